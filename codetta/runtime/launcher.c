// The launches of a bound plan, one after another: addresses are filled in, then the driver (or a function of the CPU) is called.
//
// Tensors are addressed by a root (a buffer whose address comes with the call) and an offset from it. Arguments of GPU kernels stay where
// they are between calls, under a lock; an address that has not moved costs one comparison, and a tensor map is encoded again only when its
// address has moved. No header of CUDA is needed: what is used of the driver's interface is declared here and has been stable since 12.0.
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

enum { MOST_ARGUMENTS = 512, FAILED_MEMORY = -1, FAILED_DRIVER = -2, FAILED_COUNT = -3 };

typedef struct {
    unsigned int grid[3], block[3], shared;
    void *stream;
    void *attributes;
    unsigned int count;
} LaunchConfig;

typedef struct {
    int id;
    char pad[4];
    union {
        char all[64];
        int value;
    } value;
} LaunchAttribute;

enum { PROGRAMMATIC_STREAM_SERIALIZATION = 6, L2_PROMOTION_128B = 2 };

typedef int (*LaunchKernel)(const LaunchConfig *, void *function, void **parameters, void **extra);
typedef int (*EncodeMap)(void *map, int element, uint32_t rank, void *address, const uint64_t *sizes, const uint64_t *strides,
                         const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int promotion, int fill);
typedef int (*Run)(const void *plan, const int64_t *arguments);

// An argument that is an address: which one (of a CPU's function) or where it is stored (for a kernel).
typedef struct {
    int64_t offset;
    uint64_t *place;
    uint32_t root, index;
} Pointer;

typedef struct {
    int64_t offset;
    uint64_t address;  // for which the map was encoded; 0: not yet
    void *map;
    uint64_t sizes[5], strides[5];
    uint32_t box[5], rank, root;
    int32_t element, swizzle, fill;
} Map;

typedef struct {
    void *function;
    const void *plan;
    void *arguments;  // addresses of arguments; for a CPU's function the arguments themselves
    Pointer *pointers;
    Map *maps;
    uint32_t count, pointer_count, map_count;
    uint32_t grid[3], threads, shared, dependent;
} Launch;

static LaunchKernel launch_kernel;
static EncodeMap encode_map;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// Use these functions in the driver's place.
EXPORT void codetta_use(void *launch, void *encode) {
    launch_kernel = (LaunchKernel)launch;
    encode_map = (EncodeMap)encode;
}

static int find_driver(void) {
    if (launch_kernel && encode_map) return 0;
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY);
    if (!driver) return FAILED_DRIVER;
    launch_kernel = (LaunchKernel)dlsym(driver, "cuLaunchKernelEx");
    encode_map = (EncodeMap)dlsym(driver, "cuTensorMapEncodeTiled");
    return launch_kernel && encode_map ? 0 : FAILED_DRIVER;
}

static int run_on_cpu(const Launch *each, const uint64_t *roots) {
    int64_t arguments[MOST_ARGUMENTS];
    if (each->count > MOST_ARGUMENTS) return FAILED_COUNT;
    memcpy(arguments, each->arguments, each->count * sizeof(int64_t));
    for (uint32_t i = 0; i < each->pointer_count; i++) {
        const Pointer *pointer = &each->pointers[i];
        arguments[pointer->index] = (int64_t)(roots[pointer->root] + pointer->offset);
    }
    return ((Run)each->function)(each->plan, arguments) ? FAILED_MEMORY : 0;
}

static int launch_on_gpu(Launch *each, const uint64_t *roots, void *stream) {
    static const uint32_t steps[5] = {1, 1, 1, 1, 1};
    for (uint32_t i = 0; i < each->pointer_count; i++) {
        const Pointer *pointer = &each->pointers[i];
        *pointer->place = roots[pointer->root] + pointer->offset;
    }
    for (uint32_t i = 0; i < each->map_count; i++) {
        Map *map = &each->maps[i];
        uint64_t address = roots[map->root] + map->offset;
        if (map->address == address) continue;
        map->address = 0;
        int failed = encode_map(map->map, map->element, map->rank, (void *)address, map->sizes, map->strides, map->box, steps, 0,
                                map->swizzle, L2_PROMOTION_128B, map->fill);
        if (failed) return failed;
        map->address = address;
    }
    LaunchAttribute attribute;
    memset(&attribute, 0, sizeof attribute);
    attribute.id = PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.value = 1;
    LaunchConfig config = {{each->grid[0], each->grid[1], each->grid[2]}, {each->threads, 1, 1}, each->shared, stream, &attribute,
                           each->dependent ? 1u : 0u};
    return launch_kernel(&config, each->function, (void **)each->arguments, 0);
}

// Launches first to last - 1; 0, a negative number of this file, or the driver's error.
EXPORT int codetta_launch(Launch *launches, int first, int last, const uint64_t *roots, void *stream) {
    int failed = 0;
    for (int i = first; i < last && !failed; i++) {
        Launch *each = &launches[i];
        if (!each->threads) {
            failed = run_on_cpu(each, roots);
            continue;
        }
        pthread_mutex_lock(&lock);
        failed = find_driver();
        if (!failed) failed = launch_on_gpu(each, roots, stream);
        pthread_mutex_unlock(&lock);
    }
    return failed;
}

// Whether all of these addresses are aligned as expected: the low bits of each.
EXPORT int codetta_aligned(const uint64_t *roots, const uint8_t *expected, int count) {
    uint64_t differs = 0;
    for (int i = 0; i < count; i++) differs |= (roots[i] ^ expected[i]) & 15;
    return !differs;
}
