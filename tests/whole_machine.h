// A machine for whole.cu on a CPU: every thread of the grid is a fiber, and they take turns wherever one of them would wait.
// Copies arrive late and in another order; who comes next is drawn anew in each round. A kernel that waits for ever is noticed.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <ucontext.h>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__
#define __constant__ static const
#define __launch_bounds__(...)
#define __grid_constant__

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static int min(int x, int y) { return x < y ? x : y; }
static int max(int x, int y) { return x > y ? x : y; }
static float __uint_as_float(u32 bits) { float x; memcpy(&x, &bits, 4); return x; }
static u32 __float_as_uint(float x) { u32 bits; memcpy(&bits, &x, 4); return bits; }
#define __expf expf
static float rsqrtf(float x) { return 1.f / sqrtf(x); }

namespace sim {
struct Gate {  // so many threads meet
    int all = 0, here = 0;
    u32 times = 0;
};
struct Copy {
    u32 to;
    u64 from;
    u32 bytes, barrier;
};
struct Block {
    std::vector<unsigned char> memory;
    Gate warps[9], computing, whole;
    u32 given[9][32], operands[9][32][6];
    std::vector<Copy> late;
};
struct Index { u32 x; };
struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    Index thread, block;
    bool ended = false;
};
static std::vector<Block> blocks;
static std::vector<Fiber> fibers;
static Fiber* now;
static ucontext_t scheduler;
static Index sizes;
static std::mt19937 chance;
static u32 rounds_so_far;

static Block& block() { return blocks[now->block.x]; }
static void others() { swapcontext(&now->context, &scheduler); }
static void meet(Gate& gate) {
    const u32 times = gate.times;
    if (++gate.here == gate.all) {
        gate.here = 0;
        ++gate.times;
    } else {
        while (gate.times == times) others();
    }
}
static u32 from_lane(u32 mine, u32 lane) {
    const u32 warp = now->thread.x / 32;
    block().given[warp][now->thread.x % 32] = mine;
    meet(block().warps[warp]);
    const u32 found = block().given[warp][lane % 32];
    meet(block().warps[warp]);
    return found;
}

// A barrier of shared memory: what still has to arrive, bytes that still have to come, how often all was there.
struct Barrier { u32 left : 12, all : 12, times : 8; int bytes; };
static_assert(sizeof(Barrier) == 8, "8 bytes in shared memory");
static Barrier& barrier(Block& block, u32 at) { return *(Barrier*)(block.memory.data() + at); }
static void look_at(Barrier& barrier) {
    if (barrier.left == 0 && barrier.bytes == 0) {
        barrier.left = barrier.all;
        ++barrier.times;
    }
}
static void arrive_late(Block& block) {
    for (size_t i = 0; i < block.late.size();) {
        if (chance() % 3) {
            ++i;
            continue;
        }
        const Copy copy = block.late[i];
        memcpy(block.memory.data() + copy.to, (const void*)copy.from, copy.bytes);
        barrier(block, copy.barrier).bytes -= copy.bytes;
        look_at(barrier(block, copy.barrier));
        block.late[i] = block.late.back();
        block.late.pop_back();
    }
}
// All fibers, until they have ended; 1: nobody gets on any more.
static std::function<void()> body;
static int simulate(std::function<void()> kernel, u32 count, u32 threads, u32 bytes, u32 seed, u64 rounds) {
    body = kernel;
    chance.seed(seed);
    sizes.x = threads;
    blocks = std::vector<Block>(count);
    fibers = std::vector<Fiber>(count * threads);
    for (auto& block : blocks) {
        block.memory.assign(bytes, 0xff);  // NaN
        for (auto& warp : block.warps) warp.all = 32;
        block.computing.all = threads - 32;
        block.whole.all = threads;
    }
    for (u32 i = 0; i < fibers.size(); ++i) {
        Fiber& fiber = fibers[i];
        fiber.thread.x = i % threads;
        fiber.block.x = i / threads;
        fiber.stack.resize(1 << 16);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = &scheduler;
        makecontext(&fiber.context, (void (*)()) + [] {
            body();
            now->ended = true;
        }, 0);
    }
    std::vector<u32> order(count * (threads / 32));  // warps take turns
    for (u32 i = 0; i < order.size(); ++i) order[i] = i;
    for (u64 round = 0; round < rounds; ++round) {
        bool all = true;
        rounds_so_far = round + 1;
        std::shuffle(order.begin(), order.end(), chance);
        for (u32 warp : order) {
            if (chance() % 4 == 0) {
                all = false;
                continue;  // late this time
            }
            for (u32 i = warp * 32; i < warp * 32 + 32; ++i) {
                if (fibers[i].ended) continue;
                all = false;
                now = &fibers[i];
                swapcontext(&scheduler, &now->context);
            }
        }
        for (auto& block : blocks) arrive_late(block);
        if (all) return 0;
    }
    return 1;
}
}  // namespace sim

#define threadIdx (sim::now->thread)
#define blockIdx (sim::now->block)
#define blockDim (sim::sizes)
#define memory (sim::block().memory.data())

static u32 shared(const volatile void* at) { return (u32)((const unsigned char*)at - memory); }
static void pause() { sim::others(); }
static u32 nanoseconds() { return sim::rounds_so_far; }
static void __syncthreads() { sim::meet(sim::block().whole); }
static void sync() { sim::meet(sim::block().computing); }
static void __syncwarp() { sim::meet(sim::block().warps[threadIdx.x / 32]); }
static float __shfl_xor_sync(u32, float x, int distance) { return __uint_as_float(sim::from_lane(__float_as_uint(x), threadIdx.x % 32 ^ distance)); }
static float __shfl_down_sync(u32, float x, int distance) { return __uint_as_float(sim::from_lane(__float_as_uint(x), threadIdx.x % 32 + distance)); }
static u32 atomicAdd(u32* at, u32 more) { return (*at += more) - more; }
static void atomicExch(u32* at, u32 value) { *at = value; }
static void __threadfence() {}
static void __threadfence_block() {}

static u32 nearest(float x) {
    const u32 bits = __float_as_uint(x);
    return x != x ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}
static u32 pack(float first, float second) { return nearest(first) | nearest(second) << 16; }
static float exp2_(float x) { return exp2f(x); }
static float half(u32 pair, int which) { return __uint_as_float(which ? pair & 0xffff0000u : pair << 16); }
static void multiply(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, mine[6] = {a0, a1, a2, a3, b0, b1};
    auto& all = sim::block().operands[warp];
    memcpy(all[lane], mine, sizeof mine);
    __syncwarp();
    for (int i = 0; i < 4; ++i) {
        const u32 row = lane / 4, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k) {
            const u32 *a = all[row * 4 + k % 8 / 2], *b = all[column * 4 + k % 8 / 2];
            sums[i] += half(a[i / 2 + k / 8 * 2], k % 2) * half(b[4 + k / 8], k % 2);
        }
    }
    __syncwarp();
}

static void prepare(u32 barrier, u32 arrivals) {
    sim::Barrier fresh = {};
    fresh.left = fresh.all = arrivals;
    sim::barrier(sim::block(), barrier) = fresh;
}
static void prepared() {}
static void wait(u32 barrier, u32 parity) {
    while ((sim::barrier(sim::block(), barrier).times & 1) == parity) sim::others();
}
static void arrive(u32 barrier, u32 times) {
    sim::barrier(sim::block(), barrier).left -= times;
    sim::look_at(sim::barrier(sim::block(), barrier));
}
static void expect(u32 barrier, u32 bytes) {
    sim::barrier(sim::block(), barrier).bytes += bytes;
    arrive(barrier, 1);
}
static void copy(u32 to, u64 from, u32 bytes, u32 barrier, u64) { sim::block().late.push_back({to, from, bytes, barrier}); }
static u64 read_once() { return 0; }
static void fetch_line(u64 at) { (void)*(const volatile char*)at; }

struct Line {
    u32 first, first_number, second, second_number;
};
static void look(Line& line, u64 at, bool wanted) {
    if (wanted) memcpy(&line, (const void*)at, 16);
    sim::others();
}
static void look_at_one(u32& data, u32& number, u64 at) {
    const u32* found = (const u32*)at;
    data = found[0];
    number = found[1];
    sim::others();
}
static void send(u64 to, u32 data, u32 number) {
    ((u32*)to)[0] = data;
    ((u32*)to)[1] = number;
}
static void send_two(u64 to, float first, float second, u32 number) {
    send(to, __float_as_uint(first), number);
    send(to + 8, __float_as_uint(second), number);
}
