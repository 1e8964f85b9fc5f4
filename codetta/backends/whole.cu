// A whole step of a decoder as one kernel: phases that all blocks go through together, and a stream of weights that never waits for them.
//
// One warp of each block (the feeder) walks through all phases of the step and copies every byte of weights and of the cache into a ring of
// slots in shared memory; it waits for nothing but a free slot, so it is always ahead of the others, across phases. The other warps each
// work by themselves: a warp owns whole items (two rows of weights, once or twice, or a part of the context) and gives its slots back itself.
//
// Phases hand over through packets: 32 bits of data and the number of the phase that sent them, in one word of 8 bytes. Numbers go on from
// step to step. Who needs a vector reads it until the numbers are right: no barrier of the grid, no fence, no atomic. A place in memory serves
// another vector only when every warp of every block is known to be done with the first (runtime/whole.py), and the next step is another
// launch. Every sum has one order: the same inputs give the same bits.
//
// In front of this text stand the sizes: BLOCKS, SLOT (bytes), SLOTS, AHEAD (pieces in flight), ROOM (bytes of vectors), ENTRIES, PLACE (the
// entry of the newest position), PHASES, COMPUTING (threads), TIMELINE (whether clocks are read), and what the machine can do
// (whole_machine.cu). Racecheck is to find nothing: every lane arrives for itself, and words that have no barrier are atomics.

constexpr int WARPS = COMPUTING / 32, THREADS = COMPUTING;  // that compute; the feeder is one warp more
constexpr float LOWEST = -1e30f;
static_assert(SLOTS >= 2 && AHEAD <= SLOTS, "room for a ring");

constexpr int COUNTERS = 2;  // steps, and blocks that have ended in this one

struct Table {
    u64 at[ENTRIES];  // in the order in which phases name them: addresses, with how many phases ago packets were sent in the low bits
};

struct alignas(8) Barriers {
    u64 full[SLOTS], empty[SLOTS];
    u32 issued;  // pieces
    float sums[4][WARPS];
    u32 sinks[4][WARPS];  // the bits of numbers
    u32 ended;  // warps that have put their part into sinks
    u64 table[ENTRIES];  // where it is near
};

// memory: of a block: slots, room, barriers
__device__ __forceinline__ unsigned char* room() { return memory + SLOTS * SLOT; }
__device__ __forceinline__ Barriers& barriers() { return *(Barriers*)(memory + SLOTS * SLOT + ROOM); }
__device__ __forceinline__ u32 lane() { return threadIdx.x % 32; }
__device__ __forceinline__ u32 warp() { return threadIdx.x / 32; }

// ---- numbers

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float rounded(float x) { return low(pack(x, 0.f)); }
__device__ __forceinline__ float load_bf16(u64 from, i64 at) { return low(*((const u16*)from + at)); }
__device__ __forceinline__ float load_float(u64 from, i64 at) { return *((const float*)from + at); }
__device__ __forceinline__ i64 load_long(u64 from, i64 at) { return *((const i64*)from + at); }

// What epilogues call by other names in C++.
__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + __expf(-x)); }
__device__ __forceinline__ float max_nan(float x, float y) { return x != x || y != y ? __uint_as_float(0x7fc00000u) : fmaxf(x, y); }
__device__ __forceinline__ float min_nan(float x, float y) { return x != x || y != y ? __uint_as_float(0x7fc00000u) : fminf(x, y); }

// ---- packets

constexpr u64 AGO = 7;   // the bits of an address that say how many phases ago; none of them: numbers as they are
__device__ __forceinline__ u64 plain(u64 at) { return at & ~AGO; }
__device__ __forceinline__ u32 number_of(u64 at, u32 now) { return now - (u32)(at & AGO); }

// N lines, until all that are wanted are of the phase that is expected.
template <int N>
__device__ __forceinline__ void receive(Line (&lines)[N], const u64 (&at)[N], u32 wanted, u32 now) {
    do {
#pragma unroll
        for (int j = 0; j < N; ++j) look(lines[j], plain(at[j]), wanted >> j & 1);
#pragma unroll
        for (int j = 0; j < N; ++j)
            if (lines[j].first_number == number_of(at[j], now) && lines[j].second_number == number_of(at[j], now)) wanted &= ~(1u << j);
    } while (wanted);
}
// A value of a vector that this thread needs: looked at before it is needed, waited for when it is.
struct Peek {
    u64 at;
    u32 data, found;
    bool sent, upper;

    __device__ __forceinline__ Peek(u64 from, int column) : at(from + column / 2 * 8), sent(from & AGO), upper(column & 1) {
        if (sent)
            look_at_one(data, found, plain(at));
        else
            data = *((const u32*)from + column / 2);
    }
    __device__ __forceinline__ float value(u32 now) {
        while (sent && found != number_of(at, now)) look_at_one(data, found, plain(at));
        return upper ? high(data) : low(data);
    }
};

// Columns of a store, one for each of the first COUNT lanes; two lanes make a packet.
template <int COUNT>
__device__ __forceinline__ void put(u64 to, int column, float value, u32 number) {
    const float next = __shfl_down_sync(~0u, value, 1);
    if (lane() < COUNT && lane() % 2 == 0) send(plain(to) + column / 2 * 8, pack(value, next), number);
}
template <int COUNT>
__device__ __forceinline__ void put_plain(u64 to, int column, float value) {
    const float next = __shfl_down_sync(~0u, value, 1);
    if (lane() < COUNT && lane() % 2 == 0) *((u32*)to + column / 2) = pack(value, next);
}
template <int COUNT>
__device__ __forceinline__ void put_cache(u64 to, i64 at, float value) {
    if (lane() < COUNT) *((u16*)to + at) = (u16)pack(value, 0.f);
}

// Words that warps leave for each other without a barrier.
__device__ __forceinline__ u32 left_in(u32& word) { return atomicAdd(&word, 0u); }
__device__ __forceinline__ void leave(u32& word, u32 value) { atomicExch(&word, value); }
// Whether this is the last of so many; the others have written what they had to by then.
__device__ __forceinline__ bool last_of(u32& counter, u32 all) {
    __threadfence_block();
    if (atomicAdd(&counter, 1u) != all - 1) return false;
    leave(counter, 0);
    __threadfence_block();
    return true;
}

// ---- who does what: the feeder and the others count alike

struct Walk {
    u32 now;        // number of this phase
    int place;      // of the newest position
    u32 piece = 0;  // of this block, so far
    u32 next = 0;   // block that gets the next item
    u32 turn = 0;   // items of this block, so far: their warps take turns
    u32* stamps;
};

// When a warp came by and how many pieces lay ahead of it, for those who want to see: in the words behind the counter.
enum Moment { BEGUN, RECEIVED, ENDED, PIECES, STAMPS };
__device__ __forceinline__ void stamp(const Walk& walk, Moment moment) {
    if constexpr (TIMELINE) {
        if (lane()) return;
        u32* const mine = walk.stamps + (((walk.now - 1) % PHASES * BLOCKS + blockIdx.x) * WARPS + warp()) * STAMPS;
        mine[moment] = nanoseconds();
        if (moment == RECEIVED) mine[PIECES] = left_in(barriers().issued) - walk.piece;
    }
}

struct Share {
    int first, count;  // items first, first + BLOCKS, ...
};
__device__ __forceinline__ Share share(const Walk& walk, int items) {
    int first = (int)blockIdx.x - (int)walk.next;
    if (first < 0) first += BLOCKS;
    return {first, first < items ? (items - first + BLOCKS - 1) / BLOCKS : 0};
}
__device__ __forceinline__ void done(Walk& walk, const Share& mine, int items, int pieces) {
    walk.piece += mine.count * pieces;
    walk.turn += mine.count;
    walk.next = (walk.next + items) % BLOCKS;
}

// ---- the feeder

// Up to 32 pieces in a row, one for each lane: two runs of bytes each. No more than AHEAD of them are in flight: a ring that is asked for
// all at once stands in the queues of the memory system, and every packet of the phases after it waits there, too.
__device__ __forceinline__ void push(u32 first, int count, u64 a, u64 b, u32 a_bytes, u32 b_bytes, u64 policy) {
    Barriers& bars = barriers();
    const u32 mine = first + lane(), slot = mine % SLOTS, to = shared(memory) + slot * SLOT, full = shared(&bars.full[slot]);
    for (int turn = 0; turn < count; ++turn) {
        if (lane() == turn) {
            wait(shared(&bars.empty[slot]), (mine / SLOTS & 1) ^ 1);
            const u32 before = mine - AHEAD;
            if (mine >= AHEAD) wait(shared(&bars.full[before % SLOTS]), before / SLOTS & 1);
            expect(full, a_bytes + b_bytes);
            leave(bars.issued, mine + 1);
            if (a_bytes) copy(to, a, a_bytes, full, policy);
            if (b_bytes) copy(to + a_bytes, b, b_bytes, full, policy);
        }
        __syncwarp();
    }
}

struct Rows {
    u64 a, b;
};

// Two rows of K columns of two bytes: in how many pieces, and columns of each, about the same for all.
template <int K>
struct Pieces {
    static constexpr int COUNT = (4 * K + SLOT - 1) / SLOT, COLUMNS = (K + 256 * COUNT - 1) / (256 * COUNT) * 256;
    static_assert(4 * COLUMNS <= SLOT, "a piece fits into a slot");
};

// A row of so many bytes that all blocks read a bit of, once in a step: it is in L2 when they get there, not in memory.
__device__ __forceinline__ void fetch_row(u64 at, int bytes) {
    if (at & AGO) return;
    for (int line = blockIdx.x + BLOCKS * lane(); line * 128 < bytes; line += 32 * BLOCKS) fetch_line(at + line * 128);
}

template <class P>
__device__ __forceinline__ void feed_product(Walk& walk, const u64* t, u64 policy) {
    P::fetch(t);
    constexpr int EACH = Pieces<P::K>::COUNT, COLUMNS = Pieces<P::K>::COLUMNS, ALL = EACH * P::PAIRS;
    const Share mine = share(walk, P::ITEMS);
    for (int round = 0; round < mine.count; round += WARPS) {
        const int items = min(mine.count - round, WARPS);
        for (int begin = 0; begin < items * ALL; begin += 32) {
            // The pieces of a round's items take turns, so that all warps work at once.
            const int e = begin + lane(), piece = e / items, column = piece % EACH * COLUMNS;
            const Rows rows = P::rows(t, min(mine.first + (round + e % items) * BLOCKS, P::ITEMS - 1), min(piece / EACH, P::PAIRS - 1));
            const u32 bytes = min(P::K - column, COLUMNS) * 2;
            const bool one = EACH == 1 && rows.b == rows.a + bytes;
            push(walk.piece + round * ALL + begin, min(items * ALL - begin, 32), rows.a + column * 2, rows.b + column * 2, one ? 2 * bytes : bytes,
                 one ? 0 : bytes, policy);
        }
    }
    done(walk, mine, P::ITEMS, ALL);
}

// ---- products

// A warp is done with a slot: it counts for so many of those that might share one.
constexpr u32 GIVERS = 32 * WARPS;
__device__ __forceinline__ void give_back(u32 slot, u32 times = WARPS) { arrive(shared(&barriers().empty[slot]), times); }

// Two rows of a piece after the other, times the vector in shared memory; the sums are in every lane.
template <int K>
__device__ __forceinline__ void dot(u32 piece, u32 apart, float& a, float& b) {
    constexpr int COLUMNS = Pieces<K>::COLUMNS;
    Barriers& bars = barriers();
    float even[4] = {}, odd[4] = {};
    const uint4* x = (const uint4*)room() + lane();
    // Tensor cores multiply every eighth of 16 columns of a row by every eighth of the vector's; those that belong together are the diagonal.
    auto step = [&](const uint4& w, const uint4& v, const uint4& y) {
        multiply(even, w.x, v.x, w.y, v.y, y.x, y.y);
        multiply(odd, w.z, v.z, w.w, v.w, y.z, y.w);
    };
    for (int left = K; left > 0; left -= COLUMNS) {
        const u32 slot = piece % SLOTS;
        // A slot that still waits for what it held before looks as if it were full: pieces must have been asked for.
        while ((int)(left_in(bars.issued) - piece) <= 0) pause();
        wait(shared(&bars.full[slot]), piece / SLOTS & 1);
        const int columns = min(left, COLUMNS);
        const uint4 *w = (const uint4*)(memory + slot * SLOT) + lane(), *v = w + columns / 8;
        const int whole = columns / 256;
#pragma unroll 4
        for (int i = 0; i < whole; ++i) step(w[32 * i], v[32 * i], x[32 * i]);
        if (K % 256 && columns % 256) {
            const uint4 none = make_uint4(0, 0, 0, 0);
            const bool there = lane() * 8 < columns % 256;
            step(there ? w[32 * whole] : none, there ? v[32 * whole] : none, there ? x[32 * whole] : none);
        }
        x += COLUMNS / 8;
        give_back(slot);
        piece += apart;
    }
    const u32 row = lane() / 4;
    const bool mine = lane() % 4 == row / 2;
    a = mine ? row % 2 ? even[1] + odd[1] : even[0] + odd[0] : 0.f;
    b = mine ? row % 2 ? even[3] + odd[3] : even[2] + odd[2] : 0.f;
#pragma unroll
    for (int distance = 16; distance; distance /= 2) {
        a += __shfl_xor_sync(~0u, a, distance);
        b += __shfl_xor_sync(~0u, b, distance);
    }
}

// A vector of K numbers into the room, and the sums of partials, N of them: a line for each block, or plain numbers.
template <int K, int N>
__device__ __forceinline__ void receive_vector(u64 from, const u64* partials, float (&sums)[N > 0 ? N : 1], u32 now) {
    constexpr int MINE = (K / 4 + THREADS - 1) / THREADS, EACH = (BLOCKS + THREADS - 1) / THREADS, ALL = MINE + N * EACH;
    static_assert(ALL <= 32, "too many lines for a thread");
    Line lines[ALL] = {};
    u64 at[ALL];
    u32 wanted = 0;
#pragma unroll
    for (int j = 0; j < MINE; ++j) {
        const int line = threadIdx.x + j * THREADS;
        at[j] = from + line * 16;
        if (line >= K / 4) continue;
        if (from & AGO) {
            wanted |= 1u << j;
        } else {
            const uint2 plain = *((const uint2*)from + line);
            lines[j].first = plain.x;
            lines[j].second = plain.y;
        }
    }
    if constexpr (N > 0) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            sums[n] = 0.f;
            if (!(partials[2 * n] & AGO))
                for (int i = threadIdx.x; i < (int)partials[2 * n + 1]; i += THREADS) sums[n] += load_float(partials[2 * n], i);
#pragma unroll
            for (int j = 0; j < EACH; ++j) {
                const int line = threadIdx.x + j * THREADS;
                at[MINE + n * EACH + j] = partials[2 * n] + line * 16;
                if (line < BLOCKS && partials[2 * n] & AGO) wanted |= 1u << (MINE + n * EACH + j);
            }
        }
    }
    receive(lines, at, wanted, now);
    if constexpr (N > 0) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
#pragma unroll
            for (int j = 0; j < EACH; ++j) {
                sums[n] += __uint_as_float(lines[MINE + n * EACH + j].first);
            }
#pragma unroll
            for (int distance = 16; distance; distance /= 2) sums[n] += __shfl_xor_sync(~0u, sums[n], distance);
            if (lane() == 0) barriers().sums[n][warp()] = sums[n];
        }
    }
    sync();  // nobody needs the vector of the last phase any more
#pragma unroll
    for (int j = 0; j < MINE; ++j) {
        const int line = threadIdx.x + j * THREADS;
        if (line < K / 4) *((uint2*)room() + line) = make_uint2(lines[j].first, lines[j].second);
    }
    if constexpr (N > 0) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            sums[n] = 0.f;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) sums[n] += barriers().sums[n][w];
        }
    }
    sync();
}

template <class P>
__device__ __forceinline__ void product(Walk& walk, const u64* t) {
    constexpr int EACH = Pieces<P::K>::COUNT, ALL = EACH * P::PAIRS;
    float stats[P::STATS > 0 ? P::STATS : 1], sinks[P::SINKS > 0 ? P::SINKS : 1] = {};
    stamp(walk, BEGUN);
    receive_vector<P::K, P::STATS>(t[0], t + 1, stats, walk.now);
    stamp(walk, RECEIVED);
    const Share mine = share(walk, P::ITEMS);
    for (int round = 0; round < mine.count; round += WARPS) {
        const int items = min(mine.count - round, WARPS), place = (warp() + WARPS - walk.turn % WARPS) % WARPS;
        if (place >= items) continue;
        const u32 first = walk.piece + round * ALL + place;
        P::item(t, mine.first + (round + place) * BLOCKS, stats, sinks, walk, [&](float (&a)[P::PAIRS], float (&b)[P::PAIRS]) {
#pragma unroll
            for (int pair = 0; pair < P::PAIRS; ++pair) dot<P::K>(first + items * EACH * pair, items, a[pair], b[pair]);
        });
    }
    stamp(walk, ENDED);
    if constexpr (P::SINKS > 0) {
        static_assert(P::SINKS <= 4, "room for the sums of warps");
        Barriers& bars = barriers();
#pragma unroll
        for (int n = 0; n < P::SINKS; ++n) {
            // Lanes have columns of their own in their sums.
#pragma unroll
            for (int distance = 16; distance; distance /= 2) sinks[n] += __shfl_xor_sync(~0u, sinks[n], distance);
            if (lane() == 0) leave(bars.sinks[n][warp()], __float_as_uint(sinks[n]));
        }
        // The last warp of the block sends, in the order of warps: whoever reads a sum reads a line for each block, all of them.
        if (lane() == 0 && last_of(bars.ended, WARPS)) {
#pragma unroll
            for (int n = 0; n < P::SINKS; ++n) {
                float sum = 0.f;
#pragma unroll
                for (int w = 0; w < WARPS; ++w) sum += __uint_as_float(left_in(bars.sinks[n][w]));
                send_two(plain(t[P::FIRST_SINK + n]) + blockIdx.x * 16, sum, 0.f, walk.now);
            }
        }
    }
    done(walk, mine, P::ITEMS, ALL);
}

// ---- attention of one query of each head over the cache

// t: query, new key, new value (packets), result (packets), cache of keys, of values, places (for all phases alike), parts, tops,
// positions of the cache
enum { QUERY, NEW_KEY, NEW_VALUE, RESULT, KEYS, VALUES, PLACES, PARTS, TOPS, CONTEXT };

// How the positions of the cache that are seen are split: `each` for each of `parts` warps, from position `first`; `place`: of the newest.
// Warps of a block follow each other, and what they make of one group of queries is one part for those who join them. Where a warp's
// positions are a tile or less, warps that follow each other share pieces.
template <class A>
struct Splits {
    int first, place, each, parts, tiles;
    int items, begin;  // of this block
    int lead, per;     // how many of them are of the first group; how many share a piece

    __device__ __forceinline__ Splits(const Walk& walk) : place(walk.place) {
        constexpr int STEP = 256 / A::HEAD;  // positions that a warp takes at once
        static_assert(A::GROUPS <= BLOCKS * WARPS, "a warp for each group");
        first = A::WINDOW && place >= A::WINDOW ? place - A::WINDOW + 1 : 0;
        const int all = place - first;
        each = ((all + A::PARTS - 1) / A::PARTS + STEP - 1) / STEP * STEP;
        parts = each ? (all + each - 1) / each : 1;
        tiles = (each + A::TILE - 1) / A::TILE;
        const int turn = ((int)blockIdx.x - (int)walk.next + BLOCKS) % BLOCKS;
        begin = turn * WARPS;
        items = max(0, min(A::GROUPS * parts - begin, WARPS));
        lead = min(parts - begin % parts, items);
        per = tiles == 1 ? A::TILE / each : 1;
    }
    __device__ __forceinline__ bool shares() const { return tiles == 1; }
    __device__ __forceinline__ int blocks() const { return (A::GROUPS * parts + WARPS - 1) / WARPS; }
    // Which of its group's a warp is, among those in this block; and its piece, counted from the block's first.
    __device__ __forceinline__ int within(int warp) const { return warp < lead ? warp : (warp - lead) % parts; }
    __device__ __forceinline__ int piece_of(int warp) const {
        const int groups = warp < lead ? 0 : (warp - lead) / parts, some = (lead + per - 1) / per, full = (parts + per - 1) / per;
        return (warp < lead ? 0 : some + groups * full) + within(warp) / per;
    }
    __device__ __forceinline__ int pieces() const { return items == 0 ? 0 : shares() ? piece_of(items - 1) + 1 : items * tiles; }
    __device__ __forceinline__ int part_of(int warp) const { return (begin + warp) % parts; }
    __device__ __forceinline__ int place_of(int part, int tile) const { return first + part * each + tile * A::TILE; }
    // How many positions there are from here on: in a tile of a part, or in a piece that this warp is the first of.
    __device__ __forceinline__ int seen(int part, int tile) const { return max(0, min(min(place_of(part + 1, 0), place) - place_of(part, tile), A::TILE)); }
    __device__ __forceinline__ int held(int warp) const {
        const int part = part_of(warp);
        return min(place_of(part + sharers(warp), 0), place) - place_of(part, 0);
    }
    __device__ __forceinline__ int sharers(int warp) const { return min(per, (warp < lead ? lead : min(items, warp - within(warp) + parts)) - warp); }
    // The blocks that have something of a group: the first one, and how many.
    __device__ __forceinline__ int first_block(int group) const { return group * parts / WARPS; }
    __device__ __forceinline__ int joined(int group) const { return ((group + 1) * parts - 1) / WARPS - first_block(group) + 1; }
};
template <class A>
__device__ __forceinline__ void done(Walk& walk, const Splits<A>& splits) {
    walk.piece += splits.pieces();
    walk.next = (walk.next + splits.blocks()) % BLOCKS;
}

template <class A>
__device__ __forceinline__ void feed_attention(Walk& walk, const u64* t, u64 policy) {
    const Splits<A> splits(walk);
    const int pieces = splits.pieces();
    for (int begin = 0; begin < pieces; begin += 32) {
        // A piece is a tile of keys, and behind it the values.
        const int e = begin + lane();
        int warp = e % splits.items, tile = e / splits.items;
        if (splits.shares())
            for (warp = tile = 0; warp < splits.items - 1 && splits.piece_of(warp) < e;) ++warp;
        const int group = (splits.begin + warp) / splits.parts / A::AGAIN, part = splits.part_of(warp);
        const u32 bytes = (splits.shares() ? splits.held(warp) : splits.seen(part, tile)) * A::HEAD * 2;
        const u64 at = ((i64)group * (i64)t[CONTEXT] + splits.place_of(part, tile)) * A::HEAD * 2;
        push(walk.piece + begin, min(pieces - begin, 32), t[KEYS] + at, t[VALUES] + at, bytes, bytes, policy);
    }
    done(walk, splits);
}

// Some positions against the queries of a group: 8 numbers of a head in each lane.
template <class A>
struct Mixed {
    static constexpr int LANES = A::HEAD / 8, STEP = 32 / LANES;
    float query[A::QUERIES][8], sums[A::QUERIES][8], top[A::QUERIES], total[A::QUERIES];

    template <int N>
    __device__ __forceinline__ void add(const uint4 (&keys)[N], const uint4 (&values)[N], const bool (&seen)[N]) {
        float score[N][A::QUERIES];
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const u32 k[4] = {keys[i].x, keys[i].y, keys[i].z, keys[i].w};
#pragma unroll
            for (int g = 0; g < A::QUERIES; ++g) {
                score[i][g] = 0.f;
#pragma unroll
                for (int e = 0; e < 8; ++e) score[i][g] = fmaf(e % 2 ? high(k[e / 2]) : low(k[e / 2]), query[g][e], score[i][g]);
            }
        }
#pragma unroll
        for (int distance = LANES / 2; distance; distance /= 2)
#pragma unroll
            for (int i = 0; i < N; ++i)
#pragma unroll
                for (int g = 0; g < A::QUERIES; ++g) score[i][g] += __shfl_xor_sync(~0u, score[i][g], distance);
#pragma unroll
        for (int g = 0; g < A::QUERIES; ++g) {
            float higher = top[g];
#pragma unroll
            for (int i = 0; i < N; ++i)
                if (seen[i]) higher = fmaxf(higher, score[i][g]);
            const float keep = exp2_(top[g] - higher);
            top[g] = higher;
            total[g] *= keep;
#pragma unroll
            for (int e = 0; e < 8; ++e) sums[g][e] *= keep;
#pragma unroll
            for (int i = 0; i < N; ++i) {
                score[i][g] = seen[i] ? exp2_(score[i][g] - higher) : 0.f;
                total[g] += score[i][g];
            }
        }
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const u32 v[4] = {values[i].x, values[i].y, values[i].z, values[i].w};
#pragma unroll
            for (int e = 0; e < 8; ++e)
#pragma unroll
                for (int g = 0; g < A::QUERIES; ++g) sums[g][e] = fmaf(score[i][g], e % 2 ? high(v[e / 2]) : low(v[e / 2]), sums[g][e]);
        }
    }

    // Lanes that had other positions, together.
    __device__ __forceinline__ void merge() {
#pragma unroll
        for (int distance = LANES; distance < 32; distance *= 2)
#pragma unroll
            for (int g = 0; g < A::QUERIES; ++g) {
                const float higher = fmaxf(top[g], __shfl_xor_sync(~0u, top[g], distance)), keep = exp2_(top[g] - higher);
                top[g] = higher;
                total[g] *= keep;
                total[g] += __shfl_xor_sync(~0u, total[g], distance);
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    sums[g][e] *= keep;
                    sums[g][e] += __shfl_xor_sync(~0u, sums[g][e], distance);
                }
            }
    }
};

// What a warp has of a group, for the others of its block: sums of all queries, and behind them tops and totals. Before that, queries.
template <class A>
__device__ __forceinline__ float* sums_of(u32 warp) {
    return (float*)room() + warp * (A::QUERIES + 1) * A::HEAD;
}

template <class A>
__device__ __forceinline__ void attend_part(const Walk& walk, const u64* t, const Splits<A>& splits) {
    constexpr int LINES = A::HEAD / 4, ALL = ((A::QUERIES + 2) * LINES + 31) / 32, N = 4;
    using M = Mixed<A>;
    Barriers& bars = barriers();
    const int group = (splits.begin + (int)warp()) / splits.parts, head = group * A::QUERIES, shared_head = group / A::AGAIN;
    const int part = splits.part_of(warp()), before = splits.shares() ? splits.within(warp()) % splits.per : 0;  // that share a piece with it
    const int held = splits.shares() ? splits.held(warp() - before) : 0, times = before ? 1 : WARPS + 1 - splits.sharers(warp());
    const bool newest = part == splits.parts - 1;
    float* const mine = sums_of<A>(warp());
    {
        Line lines[ALL] = {};
        u64 at[ALL];
        u32 wanted = 0;
#pragma unroll
        for (int j = 0; j < ALL; ++j) {
            const int line = lane() + 32 * j, vector = line / LINES;
            at[j] = vector < A::QUERIES ? t[QUERY] + ((i64)head * LINES + line) * 16
                                        : t[vector == A::QUERIES ? NEW_KEY : NEW_VALUE] + ((i64)shared_head * LINES + line % LINES) * 16;
            if (vector < A::QUERIES || (newest && vector < A::QUERIES + 2)) wanted |= 1u << j;
        }
        receive(lines, at, wanted, walk.now);
#pragma unroll
        for (int j = 0; j < ALL; ++j)
            if (lane() + 32 * j < (A::QUERIES + 2) * LINES) *((uint2*)mine + lane() + 32 * j) = make_uint2(lines[j].first, lines[j].second);
        __syncwarp();
    }
    M mixed;
    const int within = lane() % M::LANES, behind = lane() / M::LANES;
#pragma unroll
    for (int g = 0; g < A::QUERIES; ++g) {
        const uint4 q = *((const uint4*)mine + g * M::LANES + within);
        const u32 pairs[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            mixed.query[g][e] = (e % 2 ? high(pairs[e / 2]) : low(pairs[e / 2])) * A::scale();
            mixed.sums[g][e] = 0.f;
        }
        mixed.top[g] = LOWEST;
        mixed.total[g] = 0.f;
    }
    u32 piece = walk.piece + (splits.shares() ? splits.piece_of(warp()) : warp());
    for (int tile = 0; tile < splits.tiles; ++tile, piece += splits.items) {
        const u32 slot = piece % SLOTS;
        while ((int)(left_in(bars.issued) - piece) <= 0) pause();
        wait(shared(&bars.full[slot]), piece / SLOTS & 1);
        const int seen = splits.seen(part, tile);
        const uint4 *keys = (const uint4*)(memory + slot * SLOT) + lane() + before * splits.each * M::LANES;
        const uint4 *values = keys + (splits.shares() ? held : seen) * M::LANES;
        int j = 0;
        for (; j + N * M::STEP <= seen; j += N * M::STEP) {
            uint4 k[N], v[N];
            bool there[N];
#pragma unroll
            for (int i = 0; i < N; ++i) {
                k[i] = keys[(j / M::STEP + i) * 32];
                v[i] = values[(j / M::STEP + i) * 32];
                there[i] = true;
            }
            mixed.add(k, v, there);
        }
        for (; j < seen; j += M::STEP) {
            const uint4 none = make_uint4(0, 0, 0, 0);
            const bool there[1] = {j + behind < seen};
            const uint4 k[1] = {there[0] ? keys[j / M::STEP * 32] : none}, v[1] = {there[0] ? values[j / M::STEP * 32] : none};
            mixed.add(k, v, there);
        }
        give_back(slot, times);
    }
    if (newest) {
        const uint4 k[1] = {*((const uint4*)mine + A::QUERIES * M::LANES + within)};
        const bool there[1] = {behind == 0};
        const uint4 v[1] = {there[0] ? *((const uint4*)mine + (A::QUERIES + 1) * M::LANES + within) : make_uint4(0, 0, 0, 0)};
        mixed.add(k, v, there);
    }
    mixed.merge();
    __syncwarp();
#pragma unroll
    for (int g = 0; g < A::QUERIES; ++g) {
        if (lane() < M::LANES)
#pragma unroll
            for (int e = 0; e < 8; e += 4)
                *(float4*)(mine + g * A::HEAD + within * 8 + e) =
                    make_float4(mixed.sums[g][e], mixed.sums[g][e + 1], mixed.sums[g][e + 2], mixed.sums[g][e + 3]);
        if (lane() == 0) {
            mine[A::QUERIES * A::HEAD + 2 * g] = mixed.top[g];
            mine[A::QUERIES * A::HEAD + 2 * g + 1] = mixed.total[g];
        }
    }
}

// What the warps of this block have of a group, together: one part. Those warps share the queries.
template <class A>
__device__ __forceinline__ void send_part(const Walk& walk, const u64* t, const Splits<A>& splits) {
    const int group = (splits.begin + (int)warp()) / splits.parts, part = splits.begin / WARPS - splits.first_block(group);
    const int from = max(group * splits.parts - splits.begin, 0), to = min((group + 1) * splits.parts - splits.begin, splits.items);
    for (int g = (int)warp() - from; g < A::QUERIES; g += to - from) {
        float top = LOWEST, total = 0.f, weight[WARPS];
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            weight[w] = from <= w && w < to ? sums_of<A>(w)[A::QUERIES * A::HEAD + 2 * g] : LOWEST;
            top = fmaxf(top, weight[w]);
        }
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            weight[w] = exp2_(weight[w] - top);
            if (from <= w && w < to) total += weight[w] * sums_of<A>(w)[A::QUERIES * A::HEAD + 2 * g + 1];
        }
        const i64 at = (i64)(group * A::QUERIES + g) * A::JOINED + part;
#pragma unroll
        for (int column = 0; column < A::HEAD; column += 64) {
            float first = 0.f, second = 0.f;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                if (!(from <= w && w < to)) continue;
                const float2 its = *(const float2*)(sums_of<A>(w) + g * A::HEAD + column + 2 * lane());
                first += weight[w] * its.x;
                second += weight[w] * its.y;
            }
            send_two(t[PARTS] + (at * A::HEAD + column + 2 * lane()) * 8, first, second, walk.now);
        }
        if (lane() == 0) send_two(t[TOPS] + at * 16, top, total, walk.now);
    }
}

// The parts of 64 numbers of a head, two in each lane; warps share the parts, and their sums are added in order.
template <class A>
__device__ __forceinline__ void join_parts(const Walk& walk, const u64* t, const Splits<A>& splits, int item) {
    constexpr int N = 3;  // parts of a warp at once: there are seldom more
    const int head = item / (A::HEAD / 64), column = item % (A::HEAD / 64) * 64 + lane() * 2, parts = splits.joined(head / A::QUERIES);
    float top = LOWEST, total = 0.f, first = 0.f, second = 0.f;
    for (int begin = 0; begin < parts; begin += N * WARPS) {
        Line lines[2 * N] = {};
        u64 at[2 * N];
        u32 wanted = 0;
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const int part = begin + warp() + j * WARPS;
            const i64 place = (i64)head * A::JOINED + part;
            at[j] = t[PARTS] + (place * A::HEAD + column) * 8;
            at[N + j] = t[TOPS] + place * 16;
            if (part < parts) wanted |= (1u | 1u << N) << j;
        }
        const u32 there = wanted;
        receive(lines, at, wanted, walk.now);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            if (!(there >> j & 1)) continue;
            const float its = __uint_as_float(lines[N + j].first), higher = fmaxf(top, its), keep = exp2_(top - higher), weight = exp2_(its - higher);
            total = total * keep + weight * __uint_as_float(lines[N + j].second);
            first = first * keep + weight * __uint_as_float(lines[j].first);
            second = second * keep + weight * __uint_as_float(lines[j].second);
            top = higher;
        }
    }
    sync();  // parts lay where the sums will
    float4* const all = (float4*)room();
    all[threadIdx.x] = make_float4(top, total, first, second);
    sync();
    if (warp() == 0) {
        float highest = LOWEST;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) highest = fmaxf(highest, all[w * 32 + lane()].x);
        total = first = second = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float4 its = all[w * 32 + lane()];
            const float weight = exp2_(its.x - highest);
            total += weight * its.y;
            first += weight * its.z;
            second += weight * its.w;
        }
        send(plain(t[RESULT]) + ((i64)head * A::HEAD + column) / 2 * 8, pack(first / total, second / total), walk.now);
    }
}

template <class A>
__device__ __forceinline__ void attention(Walk& walk, const u64* t) {
    const Splits<A> splits(walk);
    stamp(walk, BEGUN);
    sync();  // queries go where the last vector lay
    if (warp() < splits.items) attend_part<A>(walk, t, splits);
    sync();
    if (warp() < splits.items) send_part<A>(walk, t, splits);
    stamp(walk, RECEIVED);  // what is its own; the parts of others come now
    done(walk, splits);
    for (int item = blockIdx.x; item < A::GROUPS * A::QUERIES * A::HEAD / 64; item += BLOCKS) join_parts<A>(walk, t, splits, item);
    stamp(walk, ENDED);
}

// ---- the kernel: phases are written behind this text

template <class Phases>
__device__ __forceinline__ void run(const Table& table, u32* counter) {
    Barriers& bars = barriers();
    Walk walk;
    const u32 steps = *(volatile u32*)counter;  // so far
    walk.now = steps * PHASES + 1;              // goes round after 2^32 phases; packets are never that old
    walk.stamps = counter + COUNTERS;
    for (u32 i = threadIdx.x; i < SLOTS; i += blockDim.x) {
        prepare(shared(&bars.full[i]), 1);
        prepare(shared(&bars.empty[i]), GIVERS);
    }
    for (u32 i = threadIdx.x; i < ENTRIES; i += blockDim.x) bars.table[i] = table.at[i];
    if (threadIdx.x == 0) bars.issued = bars.ended = 0;
    prepared();
    walk.place = (int)load_long(table.at[PLACE], 0);
    __syncthreads();
    if (warp() == WARPS) {
        Phases::feed(walk, bars.table, read_once());
    } else {
        Phases::compute(walk, bars.table);
        sync();
        // All blocks have read the number of steps when the last one ends.
        if (threadIdx.x == 0 && atomicAdd(counter + 1, 1u) == BLOCKS - 1) {
            counter[1] = 0;
            __threadfence();
            *(volatile u32*)counter = steps + 1;
        }
    }
}
