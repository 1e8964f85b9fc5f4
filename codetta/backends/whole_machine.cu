// What whole.cu asks of the machine: types, barriers and copies of shared memory, and packets, as NVIDIA's assembly has them.
// tests/whole_machine.h has the same for a CPU, where warps take turns.

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

extern __shared__ __align__(1024) unsigned char memory[];
__device__ __forceinline__ u32 shared(const volatile void* at) { return (u32)__cvta_generic_to_shared((const void*)at); }

__device__ __forceinline__ void pause() {}
__device__ __forceinline__ u32 nanoseconds() {
    u32 now;
    asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(now)::"memory");
    return now;
}

// ---- numbers

__device__ __forceinline__ u32 pack(float first, float second) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(pair) : "f"(first), "f"(second));
    return pair;
}
__device__ __forceinline__ float exp2_(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// 16 rows of 16 numbers (those of a lane: of rows r and r + 8, where r = lane / 4) times 16 rows of 8, added to 16 rows of 8.
__device__ __forceinline__ void multiply(float (&sums)[4], u32 upper, u32 lower, u32 upper_right, u32 lower_right, u32 x, u32 x_below) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(upper), "r"(lower), "r"(upper_right), "r"(lower_right), "r"(x), "r"(x_below));
}

// ---- barriers and copies

__device__ __forceinline__ void prepare(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void prepared() {
    asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
    asm volatile("{ .reg .pred done; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra AGAIN; }" ::"r"(barrier), "r"(parity) : "memory");
}
__device__ __forceinline__ void arrive(u32 barrier, u32 times) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(times) : "memory");
}
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy(u32 to, u64 from, u32 bytes, u32 barrier, u64 policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(barrier), "l"(policy)
                 : "memory");
}
__device__ __forceinline__ u64 read_once() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ void fetch_line(u64 at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }
__device__ __forceinline__ void sync() { asm volatile("bar.sync 1, %0;" ::"n"(COMPUTING) : "memory"); }  // those that compute

// ---- packets

struct Line {
    u32 first, first_number, second, second_number;
};
// Two packets at once, if they are wanted; others stay as they are.
__device__ __forceinline__ void look(Line& line, u64 at, bool wanted) {
    asm volatile("{ .reg .pred wanted; setp.ne.u32 wanted, %5, 0; @wanted ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4]; }"
                 : "+r"(line.first), "+r"(line.first_number), "+r"(line.second), "+r"(line.second_number)
                 : "l"(at), "r"((u32)wanted)
                 : "memory");
}
__device__ __forceinline__ void look_at_one(u32& data, u32& number, u64 at) {
    asm volatile("ld.relaxed.gpu.global.v2.b32 {%0, %1}, [%2];" : "=r"(data), "=r"(number) : "l"(at) : "memory");
}
__device__ __forceinline__ void send(u64 to, u32 data, u32 number) {
    asm volatile("st.relaxed.gpu.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(data), "r"(number) : "memory");
}
__device__ __forceinline__ void send_two(u64 to, float first, float second, u32 number) {
    asm volatile("st.relaxed.gpu.global.v4.b32 [%0], {%1, %3, %2, %3};" ::"l"(to), "f"(first), "f"(second), "r"(number) : "memory");
}
