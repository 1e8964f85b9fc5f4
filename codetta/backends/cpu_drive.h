// The second half of cpu_gemm.cpp: which work there is, who does it and in what memory.
//
// Rows are taken in tiles (partials of column reductions, the unit of division among threads), tiles in blocks (what an
// epilogue sees), blocks in strips of MR. All three depend on the program alone, never on the number of threads.
#pragma once

#ifdef _OPENMP
static inline int thread_number() { return omp_get_thread_num(); }
#else
static inline int thread_number() { return 0; }
#endif

// Grows and is kept, for each thread that calls: pages are expensive to get anew.
struct Workspace {
  char* memory = nullptr;
  size_t size = 0;
  char* get(size_t wanted) {
    if (wanted <= size) return memory;
    release();
    size = (wanted + (4u << 20) - 1) & ~(size_t)((2u << 20) - 1);
#if defined(__linux__)
    void* got = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memory = got == MAP_FAILED ? nullptr : (char*)got;
    if (memory) madvise(memory, size, MADV_HUGEPAGE);
#else
    void* got = nullptr;
    memory = posix_memalign(&got, 4096, size) ? nullptr : (char*)got;
#endif
    if (!memory) size = 0;
    return memory;
  }
  void release() {
#if defined(__linux__)
    if (memory) munmap(memory, size);
#else
    free(memory);
#endif
    memory = nullptr;
    size = 0;
  }
  ~Workspace() { release(); }
};
static thread_local Workspace workspace;

enum Way { PACKED, DOTS, STREAM };
// Up to how many rows reading B in place beats packing it: measured on Zen 4, 2026-11, at K 1024 to 5632.
enum { DOTS_ROWS = 16, STREAM_ROWS = 16 };
enum { STREAM_COLS = 512 };
// Rows are taken on in portions: what these hold of A is read for every panel, and B is packed anew for the next ones.
enum { PORTION_ROWS = 1024, PORTION_BYTES = 8 << 20 };
// Where all of B is no larger, and rows are many, it is packed once for all threads, and A tile by tile, for L2 to hold.
enum { BY_TILE_BYTES = 2 << 20 };
// Two panels up to this size are gone through together, in an L2 of 1 MB: half as many passes over A.
enum { PAIR_BYTES = 640 << 10 };
// Rows this far apart would fall on the same few lines of an L1.
enum { L1_WAY = 4096 };

static bool is_transposed(const i64* args, const Strip& strip) { return args[FIRST_B + B_ARGUMENTS * strip.product + B_TRANSPOSED]; }

static Way way_of(const i64* args, const Segment& segment) {
  const i64 rows = args[ROWS_PER_BATCH];
  bool adjacent_k = !args[A_TRANSPOSED], adjacent_n = true;
  for (i64 s = 0; s < segment.count; s++) {
    const Strip& strip = segment.strips[s];
    const bool transposed = is_transposed(args, strip);
    adjacent_k &= !transposed;
    adjacent_n &= transposed && strip.run >= segment.cols;
  }
  if (adjacent_k && rows <= DOTS_ROWS) return DOTS;
  if (adjacent_n && rows <= STREAM_ROWS) return STREAM;
  return PACKED;
}

struct Work {
  const Plan& plan;
  const i64* args;
  i64 batch, first, end;              // rows of this batch entry
  i64 block, blocks, strips;          // rows of a block, blocks of a row tile, strips of a block
  i64 threads;
  const uint32_t* a_packed;
  const uint32_t* a_words;            // adjacent in k
  const float* stats;
  bool in_place;                      // A is read where it is
  i64 first_strip;                    // of those in a_packed

  const T* a_row(i64 row) const {
    const i64 at = batch * args[ROWS_PER_BATCH] + row;
    return (const T*)args[A_POINTER] + at * (args[A_TRANSPOSED] ? 1 : args[A_STEP]);
  }
  i64 a_k_step() const { return args[A_TRANSPOSED] ? args[A_STEP] : 1; }
  i64 b_step(const Strip& strip) const { return args[FIRST_B + B_ARGUMENTS * strip.product + B_STEP]; }
  const T* b_col(const Strip& strip, i64 j) const {
    const i64* b = args + FIRST_B + B_ARGUMENTS * strip.product;
    const i64 col = framed(j, strip.index, strip.run, strip.block);
    return (const T*)b[B_POINTER] + batch * b[B_BATCH_STEP] + col * (b[B_TRANSPOSED] ? 1 : b[B_STEP]);
  }
  i64 row_tiles() const { return up(end - first, plan.row_tile); }
  i64 strips_of_tile() const { return blocks * strips; }

  void pack_a(i64 number, uint32_t* to) const {
    const i64 tile = number / strips_of_tile(), within = number % strips_of_tile();
    const i64 in_block = within % strips * MR, in_tile = within / strips * block + in_block;
    const i64 row = first + tile * plan.row_tile + in_tile;
    const i64 count = least(least(MR, block - in_block), least(plan.row_tile - in_tile, end - row));
    if (count <= 0) return;
    const T* lane[MR];
    for (i64 i = 0; i < count; i++) lane[i] = a_row(row + i);
    pack<MR>(lane, a_k_step(), args[A_TRANSPOSED], count, args[DEPTH], to + (number - first_strip) * MR * words(args[DEPTH]));
  }
  static i64 width(const Segment& segment) { return up(segment.panel, NR) * NR; }
  i64 panel_words(const Segment& segment) const { return segment.count * width(segment) * words(args[DEPTH]); }
  void pack_b(const Segment& segment, i64 panel, uint32_t* to) const {
    const i64 col = panel * segment.panel, cols = least(segment.panel, segment.cols - col);
    for (i64 s = 0; s < segment.count; s++)
      for (i64 j = 0; j < cols; j += NR) {
        const Strip& strip = segment.strips[s];
        const i64 count = least(NR, cols - j);
        const T* lane[NR];
        for (i64 i = 0; i < count; i++) lane[i] = b_col(strip, col + j + i);
        const bool transposed = is_transposed(args, strip);
        const bool side_by_side = transposed && lane[count - 1] - lane[0] == count - 1;
        pack<NR>(lane, transposed ? b_step(strip) : 1, side_by_side, count, args[DEPTH], to + (s * width(segment) + j) * words(args[DEPTH]));
      }
  }
  // One block of rows of one panel, into strips of `ld` columns.
  void multiply_block(const Segment& segment, Way way, i64 panel, i64 row, i64 rows, const uint32_t* a, const uint32_t* b, float* to, i64 ld) const {
    const i64 col = panel * segment.panel, cols = least(segment.panel, segment.cols - col), n = words(args[DEPTH]);
    for (i64 s = 0; s < segment.count; s++) {
      float* mine = to + s * width(segment);
      const Strip& strip = segment.strips[s];
      if (way == DOTS) {
        for (i64 j = 0; j < cols;) {
          const i64 adjacent = least(cols - j, strip.run - (col + j) % strip.run);
          dot_rows(rows, args[DEPTH], a_row(row), args[A_STEP], b_col(strip, col + j), b_step(strip), adjacent, mine + j, ld);
          j += adjacent;
        }
        continue;
      }
      for (i64 r = 0; r < rows; r += MR) {
        const Rows these = in_place ? Rows{(const char*)a_row(row + r), args[A_STEP] * (i64)sizeof(T)} : Rows{(const char*)(a + r * n), 4};
        for (i64 j = 0; j < cols; j += NR)
          (in_place ? multiply<MR, WORDS_IN_MEMORY> : multiply<MR, false>)(least(MR, rows - r), n, these, b + (s * width(segment) + j) * n, mine + r * ld + j, ld);
      }
    }
  }
  // All blocks of some row tiles of some panels, through the epilogue. b: the first of these panels.
  void run_panels(const Segment& segment, Way way, i64 panel0, i64 panel1, i64 tile0, i64 tile1, const uint32_t* b, float* to, char* room) const {
    Place at;
    at.panels = up(segment.cols, segment.panel);
    at.batch = batch;
    at.ld = segment.count * width(segment);
    at.room = room;
    at.stats = stats;
    for (i64 s = 0; s < segment.count; s++) at.acc[s] = to + s * width(segment);
    for (i64 tile = tile0; tile < tile1; tile++)
      for (i64 in_tile = 0; in_tile < plan.row_tile; in_tile += block) {
        const i64 row = first + tile * plan.row_tile + in_tile;
        if (row >= end) break;
        at.rows = least(block, least(plan.row_tile - in_tile, end - row));
        at.row = batch * args[ROWS_PER_BATCH] + row;
        at.row_tile = first / plan.row_tile + tile;
        at.first = in_tile == 0;
        const i64 strip = (tile * blocks + in_tile / block) * strips - first_strip;
        for (at.panel = panel0; at.panel < panel1; at.panel++) {
          at.col = at.panel * segment.panel;
          at.cols = least(segment.panel, segment.cols - at.col);
          const uint32_t* const mine = b + (at.panel - panel0) * panel_words(segment);
          multiply_block(segment, way, at.panel, row, at.rows, a_packed + strip * MR * words(args[DEPTH]), mine, to, at.ld);
          segment.epilogue(at, args);
        }
      }
  }
  // A range of panels of a stream: the product of all their columns first, then panel by panel through the epilogue.
  void run_stream(const Segment& segment, i64 panel0, i64 panel1, float* to, char* room) const {
    const i64 col0 = panel0 * segment.panel, cols = least(panel1 * segment.panel, segment.cols) - col0, rows = end - first;
    const i64 ld = up(cols, 16) * 16;
    for (i64 s = 0; s < segment.count; s++) {
      const Strip& strip = segment.strips[s];
      stream_rows(rows, args[DEPTH], a_words, b_col(strip, col0), b_step(strip), cols, to + s * rows * ld, ld);
    }
    Place at;
    at.panels = up(segment.cols, segment.panel);
    at.batch = batch;
    at.ld = ld;
    at.room = room;
    at.stats = stats;
    at.row_tile = 0;
    for (at.panel = panel0; at.panel < panel1; at.panel++) {
      at.col = at.panel * segment.panel;
      at.cols = least(segment.panel, segment.cols - at.col);
      for (i64 r = 0; r < rows; r += block) {
        for (i64 s = 0; s < segment.count; s++) at.acc[s] = to + (s * rows + r) * ld + at.col - col0;
        at.rows = least(block, rows - r);
        at.row = batch * args[ROWS_PER_BATCH] + r;
        at.first = r == 0;
        segment.epilogue(at, args);
      }
    }
  }
};

static i64 at_least_of(i64 x, i64 y) { return x > y ? x : y; }
static size_t aligned(size_t bytes) { return (bytes + 4095) & ~(size_t)4095; }

// Rows first to end of one batch entry. False: no memory.
static bool run_rows(const Plan& plan, const i64* args, i64 batch, i64 first, i64 end, float* stats, bool finish) {
  const i64 all_rows = args[ROWS_PER_BATCH], threads = args[THREADS], k_words = words(args[DEPTH]);
  // Few rows fit one block, and B need not be read again for the last of them.
  const i64 block = plan.row_block ? plan.row_block : all_rows <= DOTS_ROWS ? all_rows : MR;
  Work work = {plan, args, batch, first, end, block, up(plan.row_tile, block), up(block, MR), threads, nullptr, nullptr, stats, false, 0};
  work.in_place = WORDS_IN_MEMORY && !args[A_TRANSPOSED] && args[DEPTH] % PER_WORD == 0 && args[A_STEP] * sizeof(T) % L1_WAY;
  bool any_packed = false, any_stream = false;
  i64 panels = 0, tile_bytes = 0, room = 0, b_bytes = 0, all_b_bytes = 0, stream_bytes = 0;
  for (i64 s = 0; s < plan.count; s++) {
    const Segment& segment = plan.segments[s];
    const Way way = way_of(args, segment);
    any_packed |= way == PACKED;
    any_stream |= way == STREAM;
    const i64 mine = up(segment.cols, segment.panel);
    panels += mine;
    const i64 rows = at_least_of(work.strips * MR, block);
    tile_bytes = at_least_of(tile_bytes, (rows * segment.count * Work::width(segment) + 64) * 4);
    room = at_least_of(room, segment.room);
    if (way == STREAM) stream_bytes = at_least_of(stream_bytes, (segment.count * all_rows * (STREAM_COLS + segment.panel + 16) + 64) * 4);
    if (way == PACKED) {
      b_bytes = at_least_of(b_bytes, work.panel_words(segment) * 4);
      all_b_bytes += mine * work.panel_words(segment) * 4;
    }
  }
  // Panels alone keep the threads busy unless they are few: then rows are divided too, and B is packed once, for all.
  const i64 tiles = work.row_tiles();
  i64 parts = threads > 1 && panels < 4 * threads ? least(up(4 * threads, panels), tiles) : 1;
  const bool packs_a = any_packed && !work.in_place, by_tile = packs_a && tiles >= 4 * threads && all_b_bytes <= BY_TILE_BYTES;
  const bool shared = any_packed && (parts > 1 || by_tile);
  const i64 tile_words = work.strips_of_tile() * MR * k_words;
  const size_t a_size = aligned(packs_a && !by_tile ? tiles * tile_words * 4 : 0);
  const size_t words_size = aligned(any_stream ? (end - first) * k_words * 4 : 0), b_size = aligned(shared ? all_b_bytes : at_least_of(b_bytes, least(2 * b_bytes, PAIR_BYTES)));
  const size_t tile_size = aligned(at_least_of(tile_bytes, stream_bytes)), room_size = aligned(room);
  const size_t per_thread = tile_size + room_size + (by_tile ? aligned(tile_words * 4) : shared ? 0 : b_size);
  char* memory = workspace.get(a_size + words_size + (shared ? b_size : 0) + threads * per_thread);
  if (!memory) return false;
  uint32_t* const a_packed = (uint32_t*)memory;
  uint32_t* const a_words = (uint32_t*)(memory + a_size);
  uint32_t* const b_shared = (uint32_t*)(memory + a_size + words_size);
  char* const mine = memory + a_size + words_size + (shared ? b_size : 0);
  work.a_packed = a_packed;
  work.a_words = a_words;
  const i64 tiles_of_part = up(tiles, parts);
  const i64 count = plan.count;

#pragma omp parallel num_threads(threads)
  {
    char* const own = mine + thread_number() * per_thread;
    float* const tile = (float*)own;
    char* const room_here = own + tile_size;
    uint32_t* const packed_here = (uint32_t*)(own + tile_size + room_size);  // panels of B, or a tile of A
    if (finish && plan.stats) {
#pragma omp for schedule(static) nowait
      for (i64 m = 0; m < args[ROWS]; m += 64) plan.finish(args, m, least(m + 64, args[ROWS]), stats);
    }
    if (packs_a && !by_tile) {
#pragma omp for schedule(static) nowait
      for (i64 s = 0; s < tiles * work.strips_of_tile(); s++) work.pack_a(s, a_packed);
    }
    if (any_stream) {
#pragma omp for schedule(static) nowait
      for (i64 r = 0; r < end - first; r++)
        for (i64 w = 0; w < k_words; w++) {
          const i64 k = w * PER_WORD, step = work.a_k_step();
          a_words[r * k_words + w] = word_of(work.a_row(first + r) + k * step, step, args[DEPTH] - k);
        }
    }
    if (shared) {
      uint32_t* to = b_shared;
      for (i64 s = 0; s < count; s++) {
        const Segment& segment = plan.segments[s];
        if (way_of(args, segment) != PACKED) continue;
        const i64 mine_here = up(segment.cols, segment.panel);
#pragma omp for schedule(static) nowait
        for (i64 p = 0; p < mine_here; p++) work.pack_b(segment, p, to + p * work.panel_words(segment));
        to += mine_here * work.panel_words(segment);
      }
    }
    if ((finish && plan.stats) || packs_a || shared || any_stream) {
#pragma omp barrier
    }
    if (by_tile) {
      // The last tiles are halved, for threads to end together: one takes every other panel.
      const i64 undivided = at_least_of(tiles - 2 * threads, 0);
      Work part = work;
      part.a_packed = packed_here;
#pragma omp for schedule(dynamic, 1) nowait
      for (i64 job = 0; job < 2 * tiles - undivided; job++) {
        const i64 late = job - undivided, t = late < 0 ? job : undivided + late / 2;
        part.first_strip = t * work.strips_of_tile();
        for (i64 s = 0; s < work.strips_of_tile(); s++) part.pack_a(part.first_strip + s, packed_here);
        const uint32_t* b = b_shared;
        for (i64 s = 0, number = 0; s < count; s++) {
          const Segment& segment = plan.segments[s];
          for (i64 p = 0; p < up(segment.cols, segment.panel); p++, number++, b += work.panel_words(segment))
            if (late < 0 || number % 2 == late % 2) part.run_panels(segment, PACKED, p, p + 1, t, t + 1, b, tile, room_here);
        }
      }
    }
    const uint32_t* b = b_shared;
    for (i64 s = 0; s < count && !by_tile; s++) {
      const Segment& segment = plan.segments[s];
      const Way way = way_of(args, segment);
      const i64 mine_here = up(segment.cols, segment.panel);
      if (way == STREAM) {
        const i64 together = at_least_of(least(STREAM_COLS, up(segment.cols, 2 * threads)) / segment.panel, 1);
#pragma omp for schedule(dynamic, 1) nowait
        for (i64 p = 0; p < mine_here; p += together) work.run_stream(segment, p, least(p + together, mine_here), tile, room_here);
        continue;
      }
      const i64 panel_size = work.panel_words(segment), parts_here = way == PACKED ? parts : 1;
      const i64 tiles_here = way == PACKED ? tiles_of_part : tiles;
      // The last panels are taken singly, for threads to end together.
      const bool in_pairs = way == PACKED && !shared && 2 * panel_size * 4 <= PAIR_BYTES;
      const i64 pairs = in_pairs ? at_least_of(mine_here - 2 * threads, 0) / 2 : 0;
#pragma omp for schedule(dynamic, 1) nowait
      for (i64 job = 0; job < (mine_here - pairs) * parts_here; job++) {
        const i64 number = job / parts_here, part = job % parts_here;
        const i64 p0 = number + least(number, pairs), p1 = p0 + (number < pairs ? 2 : 1);
        const uint32_t* packed = b + p0 * panel_size;
        if (way == PACKED && !shared) {
          for (i64 p = p0; p < p1; p++) work.pack_b(segment, p, packed_here + (p - p0) * panel_size);
          packed = packed_here;
        }
        work.run_panels(segment, way, p0, p1, part * tiles_here, least((part + 1) * tiles_here, tiles), packed, tile, room_here);
      }
      if (shared && way == PACKED) b += mine_here * panel_size;
    }
  }
  return true;
}

static thread_local Workspace finished;

// 0, or what went wrong: 1 no memory.
extern "C" __attribute__((visibility("default"))) int codetta_run(const Plan* plan, const i64* args) {
  float* stats = nullptr;
  if (plan->stats && !(stats = (float*)finished.get((plan->stats * args[ROWS] + 16) * 4))) return 1;
  const i64 rows = args[ROWS_PER_BATCH], times = up(rows, at_least_of(PORTION_ROWS, PORTION_BYTES / (4 * at_least_of(words(args[DEPTH]), 1))));
  const i64 at_once = up(up(rows, times), plan->row_tile) * plan->row_tile;
  bool finish = true;
  for (i64 batch = 0; batch < args[BATCH]; batch++)
    for (i64 row = 0; row < rows; row += at_once) {
      if (!run_rows(*plan, args, batch, row, least(row + at_once, rows), stats, finish)) return 1;
      finish = false;
    }
  return 0;
}

// The first of n numbers (of 4 or 8 bytes) that is not from low up to, not including, high; n if there is none.
extern "C" __attribute__((visibility("default"))) i64 codetta_first_outside(const void* numbers, i64 bytes, i64 n, i64 low, i64 high) {
  for (i64 i = 0; i < n; i++) {
    const i64 x = bytes == 8 ? ((const i64*)numbers)[i] : ((const int32_t*)numbers)[i];
    if (x < low || x >= high) return i;
  }
  return n;
}
