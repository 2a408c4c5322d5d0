// The three sweeps of a step on a CPU: observe, measure and apply over a batch of tensors a call, and between the first
// two the average of the statistics. reference.py is the specification; its letters are used here.
//
// A C interface for ctypes, without torch's headers and without a pool of threads of its own: torch lends its own.
// The sweeps are compiled once for each instruction set, by including this file again; the best one is taken when the
// library is loaded. Sums have 16 lanes whatever the width of a register, no product is contracted with a sum, tiles
// follow from the shapes alone and are summed in order: the bits are the same on every machine, for any threads.
#ifndef ISA

#include <algorithm>
#include <atomic>
#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>
#include <type_traits>
#include <vector>

#if !defined(__GNUC__)
#error "the sweeps are written with the vector types of GCC and Clang"
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

namespace {

using Index = int64_t;

enum Type : Index { F32, BF16, F16, F64 };

// One tensor as a stack of matrices [batch, n, m] in memory; without factors all of it is one row, n = 1.
struct Shape {
  Index batch, n, m;
  Index factored;
  Index swapped;  // R belongs to the columns in memory, C to the rows
  Index limited;  // whether max_row_boost is for the rows in memory, else for the columns
  Index p, g, moment;  // Type of each
  Index rows, columns, elements;  // of the tensor that this may be a shard of: n, m and all elements
  Index speaks;  // whether this shard's statistics count in the totals of those that others have too

  Index numel() const { return batch * n * m; }
};

// Addresses. R is that of the rows in memory, C that of its columns: the other way round where the plan is swapped. comp
// is null but for a compensation of p's rounding. Of a shard, rows and cols are where its sums go, to be reduced between
// the sweeps, else they are null; totals is where two numbers for each matrix go, the sum of what mean(C) is taken of and
// that of |g|^2, where columns are elsewhere, else null.
struct Tensor {
  void *p;
  const void *g;
  void *R, *C, *V, *moment, *comp;
  void *rows, *cols, *totals;
};

// Where a tensor's elements are among all draws of stochastic rounding: dims from the outermost in memory on, and what a
// step along each adds to the index, which begins with start.
constexpr Index RANK = 8;
struct Counter {
  uint64_t key;
  Index start, rank;
  Index size[RANK], stride[RANK];
};

// The rows of the table of step numbers.
enum Row : Index { B, RHO, ADDED, FLOOR, CAP, EPS2, D, DECAY, KEEP1, SIGN, BOOST, UNSCALE, SHRINK, STEP };

// What a call works on: k tensors.
struct Batch {
  Index k, threads;
  Index wide;      // arithmetic in double instead of float
  Index momentum;  // 0 none, 1 after alpha, 2 before it
  Index decay;     // 0 none, 1 as it is, 2 times alpha
  const Shape *shapes;
  const Tensor *tensors;
  const Counter *counters;  // null where all parameters are rounded to the nearest
  void *scratch;
  const void *numbers;  // the table: a row for each Row, k columns
  Index stride;         // from row to row
  const uint8_t *still;  // null where all move
  const uint8_t *hold;   // those that stay as they are, state and all; null where none does
  uint8_t *bad;          // where observe marks gradients that are not finite; null where nobody asks
  void *p2, *g2, *u2;    // sums of squares; p2 is null where nothing scales, g2 where nobody asks

  template <class A>
  A number(Row row, Index t) const {
    return static_cast<const A *>(numbers)[row * stride + t];
  }

  bool holds(Index t) const { return hold && hold[t]; }

  bool looks_at_gradients() const { return bad || g2; }
};

// Elements that one pass works on while they stay in the first level of cache.
constexpr Index CHUNK = 1024;
// Elements of a run, and how many streams of them a sweep that reads one tensor, or that writes another, goes along in
// turn: the hardware fetches ahead for each of them. Bytes that apply asks for ahead.
constexpr Index RUN = 256, STREAMS = 4, APPLY_STREAMS = 2, AHEAD = 1024;
// Columns whose sums stay there too.
constexpr Index STRIP = 4096;
// Numbers that are added up in the arithmetic's own precision before they go into doubles.
constexpr Index FLUSH = 256;
// Tiles have between so many elements: enough to pay for their start, few enough for their column sums to be small.
constexpr Index SMALL = 1 << 16, LARGE = 1 << 19;
// Rows of a tile of a large tensor, at least.
constexpr Index LOWEST = 512;
// Tiles a tensor is cut into while they are no smaller and no larger than that.
constexpr Index PIECES = 32;
// Elements that are not worth a second thread, as in torch: a forked process, which has no second one, can step them.
constexpr Index ALONE = 1 << 15;

Index cut(Index size, Index piece) { return (size + piece - 1) / piece; }

// Part of a tensor, in memory: of rows first to last, counted through all its matrices, the columns j0 to j1. It begins
// after so many of the batch's elements.
struct Tile {
  Index tensor, first, last, j0, j1, before;

  Index size() const { return (last - first) * (j1 - j0); }
};

// Where a tensor's sums are in the scratch, in numbers of the arithmetic's type. rows and cols hold the sums of all
// tiles, then the inverse roots of the statistics; a shard's are elsewhere. Tensors of several strips or blocks have
// partial sums behind them.
struct Place {
  Index strips, blocks;
  Index strip, block;  // columns and rows of a tile
  Index rows, cols, row_parts, col_parts;
};

template <class A>
A *rows_of(const Batch &batch, const Place &at, Index t) {
  void *own = batch.tensors[t].rows;
  return own ? static_cast<A *>(own) : static_cast<A *>(batch.scratch) + at.rows;
}

template <class A>
A *cols_of(const Batch &batch, const Place &at, Index t) {
  void *own = batch.tensors[t].cols;
  return own ? static_cast<A *>(own) : static_cast<A *>(batch.scratch) + at.cols;
}

// A size in equal parts of about a piece, rounded up to a multiple.
Index balanced(Index size, Index piece, Index multiple) {
  return cut(cut(size, cut(size, piece)), multiple) * multiple;
}

// Fills in the places; returns how many numbers of scratch the batch needs.
Index arrange(const Batch &batch, std::vector<Place> &places) {
  Index end = 0;
  for (Index t = 0; t < batch.k; ++t) {
    const Shape &s = batch.shapes[t];
    Place at{1, 1, s.m, s.n, 0, 0, 0, 0};
    if (s.factored) {
      Index tile = std::min(std::max(s.numel() / PIECES, SMALL), LARGE);
      if (s.n * s.m > tile || s.m > STRIP) {
        // Of a large tensor, tiles are rather narrow than low: each needs memory for the sums of its columns.
        Index strip = tile < LARGE ? STRIP : LARGE / LOWEST;
        at.strip = s.m > strip ? balanced(s.m, strip, 16) : s.m;
        at.strips = cut(s.m, at.strip);
        at.block = balanced(s.n, std::max(tile / at.strip, Index{1}), 4);
        at.blocks = cut(s.n, at.block);
      }
      at.rows = end;
      end += batch.tensors[t].rows ? 0 : s.batch * s.n;
      at.cols = end;
      end += batch.tensors[t].cols ? 0 : s.batch * s.m;
      at.row_parts = end;
      end += at.strips > 1 ? s.batch * s.n * at.strips : 0;
      at.col_parts = end;
      end += at.blocks > 1 ? s.batch * s.m * at.blocks : 0;
    }
    places.push_back(at);
  }
  return end;
}

// The tiles of the factored gradients for observe, whose rows are all of one matrix or all of several.
std::vector<Tile> blocks(const Batch &batch, const std::vector<Place> &places) {
  std::vector<Tile> tiles;
  Index before = 0;
  for (Index t = 0; t < batch.k; ++t) {
    const Shape &s = batch.shapes[t];
    const Place &at = places[t];
    Index stack = at.strips * at.blocks > 1 ? 1 : std::max(SMALL / (s.n * s.m), Index{1});
    for (Index b = 0; s.factored && b < s.batch; b += stack)
      for (Index i = 0; i < s.n; i += at.block)
        for (Index j = 0; j < s.m; j += at.strip) {
          Index first = b * s.n + i, last = (std::min(b + stack, s.batch) - 1) * s.n + std::min(i + at.block, s.n);
          tiles.push_back({t, first, last, j, std::min(j + at.strip, s.m), before + first * s.m + j});
        }
    before += s.numel();
  }
  return tiles;
}

// The tiles of all tensors, or of those without factors, for what sums no columns: contiguous.
std::vector<Tile> pieces(const Batch &batch, bool factored = true) {
  std::vector<Tile> tiles;
  Index before = 0;
  for (Index t = 0; t < batch.k; ++t) {
    const Shape &s = batch.shapes[t];
    Index rows = std::max(SMALL / s.m, Index{1}), columns = std::min(s.m, SMALL);
    Index end = factored || !s.factored ? s.batch * s.n : 0;
    for (Index i = 0; i < end; i += rows)
      for (Index j = 0; j < s.m; j += columns)
        tiles.push_back(
            {t, i, std::min(i + rows, s.batch * s.n), j, std::min(j + columns, s.m), before + i * s.m + j});
    before += s.numel();
  }
  return tiles;
}

// The matrices of all factored tensors in stacks: what combining and averaging them is spread over. Here first and last
// count matrices, and j1 stands for the numbers of each.
std::vector<Tile> matrices(const Batch &batch) {
  std::vector<Tile> tiles;
  Index before = 0;
  for (Index t = 0; t < batch.k; ++t) {
    const Shape &s = batch.shapes[t];
    Index stack = std::max(SMALL / (s.n + s.m), Index{1});
    for (Index b = 0; s.factored && b < s.batch; b += stack) {
      tiles.push_back({t, b, std::min(b + stack, s.batch), 0, s.n + s.m, before});
      before += tiles.back().size();
    }
  }
  return tiles;
}

// torch_parallel_for, and int64_t begin, end and the context of a callback.
using Callback = void (*)(Index, Index, void *);
using ParallelFor = int32_t (*)(Index, Index, Index, Callback, void *);
ParallelFor parallel_for = nullptr;

// Runs f on every tile. Each thread has a share of the batch's elements, the same in every sweep, since what a core has
// in its caches is far from the others; who is done helps the others, since a machine does other things too. No result
// depends on who does what. Backwards, a sweep begins with what the one before it left in cache.
template <class F>
void over(const std::vector<Tile> &tiles, Index threads, bool backwards, const F &f) {
  struct alignas(64) Share {
    std::vector<Index> tiles;
    std::atomic<Index> next{0};
  };
  struct Work {
    const std::vector<Tile> &tiles;
    std::vector<Share> shares;
    bool backwards;
    const F &f;

    void run(Index thread) {
      for (size_t k = 0; k < shares.size(); ++k) {
        Share &share = shares[(thread + k) % shares.size()];
        Index size = Index(share.tiles.size());
        for (Index i; (i = share.next.fetch_add(1, std::memory_order_relaxed)) < size;) {
          Index tile = share.tiles[backwards ? size - 1 - i : i];
          f(tiles[tile], tile);
        }
      }
    }
  };
  if (tiles.empty()) return;
  Index end = 0;
  for (const Tile &tile : tiles) end = std::max(end, tile.before + tile.size());
  threads = std::min({threads, Index(tiles.size()), cut(end, ALONE)});
  Work work{tiles, std::vector<Share>(threads), backwards, f};
  for (size_t i = 0; i < tiles.size(); ++i) work.shares[tiles[i].before * threads / end].tiles.push_back(Index(i));
  if (threads == 1) return work.run(0);
  auto run = [](Index first, Index last, void *context) {
    for (Index i = first; i < last; ++i) static_cast<Work *>(context)->run(i);
  };
  if (parallel_for(0, threads, 1, run, &work) != 0) throw std::runtime_error("torch_parallel_for");
}

struct Sweeps {
  const char *name;
  void (*observe)(const Batch &);
  void (*average)(const Batch &);
  void (*measure)(const Batch &);
  void (*apply)(const Batch &);
};

}  // namespace

#define ISA baseline
#define BYTES 16
#include "adafactor.cpp"
#undef ISA
#undef BYTES

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#define ISA avx2
#define BYTES 32
#include "adafactor.cpp"
#undef ISA
#undef BYTES
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push( \
    __attribute__((target("avx2,fma,avx512f,avx512bw,avx512cd,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512cd,avx512dq,avx512vl,prefer-vector-width=512")
#endif
#define ISA avx512
#define BYTES 64
#include "adafactor.cpp"
#undef ISA
#undef BYTES
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

namespace {

// The instruction sets of this machine, the best one last.
std::vector<const Sweeps *> available() {
  std::vector<const Sweeps *> found{&baseline::sweeps};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    found.push_back(&avx2::sweeps);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd"))
      found.push_back(&avx512::sweeps);
  }
#endif
  return found;
}

const Sweeps *chosen = nullptr;

// 0, or 1 where there is no memory, or 2 where the threads fail.
int32_t call(void (*sweep)(const Batch &), const Batch *batch) {
  try {
    sweep(*batch);
  } catch (const std::bad_alloc &) {
    return 1;
  } catch (const std::runtime_error &) {
    return 2;
  }
  return 0;
}

}  // namespace

#if defined(_WIN32)
#define EXPORT extern "C" __declspec(dllexport)
#else
#define EXPORT extern "C" __attribute__((visibility("default")))
#endif

// What kernel.py checks before anything else: changed whenever a struct or a function here is.
EXPORT Index adafactor_interface() { return 3; }

// Takes torch_parallel_for.
EXPORT void adafactor_start(ParallelFor function) {
  parallel_for = function;
  chosen = available().back();
}

// The name of the i-th instruction set that this machine has, or null.
EXPORT const char *adafactor_isa(Index i) {
  auto found = available();
  return i < Index(found.size()) ? found[i]->name : nullptr;
}

// Takes the i-th instruction set from now on.
EXPORT void adafactor_choose(Index i) { chosen = available().at(i); }

// How many numbers of scratch a batch needs; -1 where there is no memory to work it out.
EXPORT Index adafactor_scratch(const Batch *batch) {
  try {
    std::vector<Place> places;
    return arrange(*batch, places);
  } catch (const std::bad_alloc &) {
    return -1;
  }
}

// Copies each step count to t, with this step.
EXPORT void adafactor_count(Index k, const float *const *steps, float *t) {
  for (Index i = 0; i < k; ++i) t[i] = *steps[i] + 1;
}

// Copies t to the step counts.
EXPORT void adafactor_keep(Index k, float *const *steps, const float *t) {
  for (Index i = 0; i < k; ++i) *steps[i] = t[i];
}

EXPORT int32_t adafactor_observe(const Batch *batch) { return call(chosen->observe, batch); }
EXPORT int32_t adafactor_average(const Batch *batch) { return call(chosen->average, batch); }
EXPORT int32_t adafactor_measure(const Batch *batch) { return call(chosen->measure, batch); }
EXPORT int32_t adafactor_apply(const Batch *batch) { return call(chosen->apply, batch); }

#else  // for each instruction set

namespace {
namespace ISA {

struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <class To, class From>
INLINE To bits_of(From x) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

// The conversions, for one number and for vectors of them: U is uint32_t or a vector of it, R float or a vector of it.

// All ones where x > limit; both are below 2^31.
template <class U>
INLINE U exceeds(U x, uint32_t limit) {
  return U{} - ((limit - x) >> 31);
}

template <class R, class U>
INLINE R from_bfloat16(U x) {
  return bits_of<R>(U(x << 16));
}

template <class R, class U>
INLINE R from_float16(U x) {
  // The exponent's bias is 112 smaller. A denormal number is what it adds to 2^-14: normal in float, so that nothing is
  // lost where the processor takes denormal numbers for 0.
  U magnitude = (x & 0x7fff) << 13, normal = magnitude + (112u << 23);
  U denormal = bits_of<U>(R(bits_of<R>(U(magnitude + (113u << 23))) - 0x1p-14f));
  U is_normal = exceeds(magnitude, 0x007fffff), special = exceeds(magnitude, 0x0f7fffff) & 0x7f800000;
  return bits_of<R>(U((normal & is_normal) | (denormal & ~is_normal) | special | ((x & 0x8000) << 16)));
}

// To the nearest, ties to even; nan stays nan.
template <class U, class R>
INLINE U to_bfloat16(R x) {
  U bits = bits_of<U>(x), nan = exceeds(U(bits & 0x7fffffff), 0x7f800000);
  return (((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) & ~nan) | (nan & 0x7fc0);
}

template <class U, class R>
INLINE U to_float16(R x) {
  U bits = bits_of<U>(x), magnitude = bits & 0x7fffffff;
  U normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  // Below the smallest normal number, adding one half makes the sum round where the last place is.
  U denormal = bits_of<U>(R(bits_of<R>(magnitude) + 0.5f)) - (126u << 23);
  U is_normal = exceeds(magnitude, (113u << 23) - 1), is_special = exceeds(magnitude, (143u << 23) - 1);
  U special = (exceeds(magnitude, 0x7f800000) & 0x200) | 0x7c00;
  U finite = (normal & is_normal) | (denormal & ~is_normal);
  return (finite & ~is_special) | (special & is_special) | ((bits >> 16) & 0x8000);
}

// Up or down, with the probability that makes the mean x: the lowest bits of the draws are added below the last place
// that is kept. inf and nan are kept.
template <class U, class R>
INLINE U to_bfloat16(R x, U draws) {
  U bits = bits_of<U>(x), magnitude = bits & 0x7fffffff;
  U finite = ~exceeds(magnitude, 0x7f7fffff), nan = exceeds(magnitude, 0x7f800000);
  return (((bits + (draws & finite & 0xffff)) >> 16) & ~nan) | (nan & 0x7fc0);
}

template <class U, class R>
INLINE U to_float16(R x, U draws) {
  U bits = bits_of<U>(x), magnitude = bits & 0x7fffffff, special = exceeds(magnitude, 0x7f7fffff);
  U exponent = magnitude >> 23, significand = (magnitude & 0x7fffff) | (exceeds(exponent, 0) & 0x800000);
  // In units of the last place: of the number's own binade, and of 2^-24 where there is no smaller one.
  U is_normal = exceeds(exponent, 113), binade = (exponent & is_normal) | (113 & ~is_normal);
  // 31 random bits are enough: what is below them is cut off. Whatever that leaves of 24 bits is 0 after 31 of them.
  U below = 13 + binade - exponent, is_far = exceeds(below, 31), far = (below - 31) & is_far;
  U is_out = exceeds(far, 31);
  significand = significand >> ((far & ~is_out) | (31 & is_out));
  below = (below & ~is_far) | (31 & is_far);
  U one = U{} + 1, found = (significand + (draws & ((one << below) - 1))) >> below;
  found += (binade - 113) << 10;
  U is_inf = exceeds(found, 0x7c00);
  found = (found & ~is_inf) | (0x7c00 & is_inf) | ((bits >> 16) & 0x8000);
  return (found & ~special) | (to_float16<U>(x) & special);
}

// The draws: a hash of key, step and index, see rounding.py.

INLINE uint32_t mix(uint32_t x, uint32_t salt = 0) {
  x ^= x >> 16;
  x *= 0x21f0aaad;
  x ^= (x >> 15) ^ salt;
  x *= 0x735a2d97;
  return x ^ (x >> 15);
}

struct Salt {
  uint32_t first, second;
};

INLINE Salt salt(const Counter &at, uint32_t t, uint32_t high) {
  uint32_t first = mix(uint32_t(at.key) ^ t), second = mix(uint32_t(at.key >> 32) ^ first);
  first = mix(first ^ second ^ high);
  return {first, mix(second ^ first)};
}

// The draws of one tensor at one step.
struct Draws {
  const Counter &at;
  uint32_t t;
  Index high;  // the upper halves of the indices that it is salted for
  Salt salted;

  Draws(const Counter &at, uint32_t t) : at(at), t(t), high(at.start >> 32), salted(salt(at, t, uint32_t(high))) {}

  // Those of size elements, from the start-th in memory on.
  INLINE void fill(Index start, Index size, uint32_t *to) {
    if (at.rank == 1) return line(at.start + start * at.stride[0], at.stride[0], size, to);
    Index position[RANK], index = at.start, inner = at.rank - 1;
    for (Index d = inner; d >= 0; --d) {
      position[d] = start % at.size[d];
      start /= at.size[d];
      index += position[d] * at.stride[d];
    }
    while (size > 0) {
      Index count = std::min(size, at.size[inner] - position[inner]), step = at.stride[inner];
      line(index, step, count, to);
      to += count;
      size -= count;
      position[inner] += count;
      index += count * step;
      for (Index d = inner; d > 0 && position[d] == at.size[d]; --d) {
        index += at.stride[d - 1] - at.size[d] * at.stride[d];
        position[d] = 0;
        ++position[d - 1];
      }
    }
  }

  // Those of indices so many steps apart. The upper half changes once in 2^32.
  INLINE void line(Index index, Index step, Index size, uint32_t *to) {
    while (size > 0) {
      if (index >> 32 != high) {
        high = index >> 32;
        salted = salt(at, t, uint32_t(high));
      }
      Index count = size;
      if ((index + (size - 1) * step) >> 32 != high) count = cut((high + 1) * (Index{1} << 32) - index, step);
      uint32_t low = uint32_t(index), stride = uint32_t(step);
      for (uint32_t j = 0; j < uint32_t(count); ++j) to[j] = mix((low + j * stride) ^ salted.first, salted.second);
      to += count;
      size -= count;
      index += count * step;
    }
  }
};

INLINE float value(float x) { return x; }
INLINE double value(double x) { return x; }
INLINE float value(Bfloat16 x) { return from_bfloat16<float>(uint32_t{x.bits}); }
INLINE float value(Float16 x) { return from_float16<float>(uint32_t{x.bits}); }

INLINE void round_to(float x, float &y) { y = x; }
INLINE void round_to(double x, double &y) { y = x; }
INLINE void round_to(double x, float &y) { y = float(x); }
INLINE void round_to(float x, double &y) { y = x; }
INLINE void round_to(float x, Bfloat16 &y) { y.bits = uint16_t(to_bfloat16<uint32_t>(x)); }
INLINE void round_to(float x, Float16 &y) { y.bits = uint16_t(to_float16<uint32_t>(x)); }
INLINE void round_to(double x, Bfloat16 &y) { round_to(float(x), y); }
INLINE void round_to(double x, Float16 &y) { round_to(float(x), y); }

// Calls f with a null pointer of the type.
template <class F>
INLINE void with(Index type, const F &f) {
  switch (type) {
    case F32: return f(static_cast<float *>(nullptr));
    case BF16: return f(static_cast<Bfloat16 *>(nullptr));
    case F16: return f(static_cast<Float16 *>(nullptr));
    default: return f(static_cast<double *>(nullptr));
  }
}

typedef uint32_t Words __attribute__((vector_size(BYTES)));
typedef uint16_t Halves __attribute__((vector_size(BYTES / 2)));

INLINE Words widen(Halves x) {
#if defined(__x86_64__) && BYTES == 32
  // GCC makes two halves of it.
  return (Words)_mm256_cvtepu16_epi32((__m128i)x);
#else
  return __builtin_convertvector(x, Words);
#endif
}

// 16 numbers, in as many registers as it takes.
template <class A>
struct Lanes {
  static constexpr Index WIDTH = BYTES / sizeof(A), COUNT = 16 / WIDTH;
  typedef A Native __attribute__((vector_size(BYTES)));
  Native v[COUNT];

  INLINE static Lanes zero() {
    Lanes x;
    for (Index i = 0; i < COUNT; ++i) x.v[i] = Native{};
    return x;
  }
  template <class T>
  INLINE static Lanes load(const T *from) {
    Lanes x;
    for (Index i = 0; i < COUNT; ++i) load(from + i * WIDTH, x.v[i]);
    return x;
  }
  // The first size numbers, then the filling.
  template <class T>
  INLINE static Lanes load(const T *from, Index size, T filling = T{}) {
    T part[16];
    std::fill(part, part + 16, filling);
    for (Index i = 0; i < size; ++i) part[i] = from[i];
    return load(part);
  }
  template <class T>
  INLINE void store(T *to) const {
    for (Index i = 0; i < COUNT; ++i) store(v[i], to + i * WIDTH);
  }
  template <class T>
  INLINE void store(T *to, Index size) const {
    T part[16];
    store(part);
    for (Index i = 0; i < size; ++i) to[i] = part[i];
  }
  // Rounded stochastically, with 16 draws.
  template <class T>
  INLINE void store(T *to, const uint32_t *draws) const {
    for (Index i = 0; i < COUNT; ++i) {
      Words bits;
      std::memcpy(&bits, draws + i * WIDTH, sizeof bits);
      put(std::is_same<T, Bfloat16>::value ? to_bfloat16<Words>(v[i], bits) : to_float16<Words>(v[i], bits), to + i * WIDTH);
    }
  }

  // Stores to the nearest, and gives what is there then.
  template <class T>
  INLINE Lanes rounded_to(T *to) const {
    constexpr bool is_bfloat16 = std::is_same<T, Bfloat16>::value;
    Lanes x;
    for (Index i = 0; i < COUNT; ++i) {
      Words words = is_bfloat16 ? to_bfloat16<Words>(v[i]) : to_float16<Words>(v[i]);
      put(words, to + i * WIDTH);
      x.v[i] = is_bfloat16 ? from_bfloat16<Native>(words) : from_float16<Native>(words);
    }
    return x;
  }

  INLINE static void load(const A *from, Native &x) { std::memcpy(&x, from, BYTES); }
  INLINE static void store(const Native &x, A *to) { std::memcpy(to, &x, BYTES); }
  template <class T>
  INLINE static void load(const T *from, Native &x) {
    if constexpr (sizeof(T) == 2 && sizeof(A) == 4) {
      Halves bits;
      std::memcpy(&bits, from, sizeof bits);
      Words words = widen(bits);
      x = std::is_same<T, Bfloat16>::value ? from_bfloat16<Native>(words) : from_float16<Native>(words);
    } else {
      for (Index i = 0; i < WIDTH; ++i) x[i] = A(value(from[i]));
    }
  }
  template <class T>
  INLINE static void store(const Native &x, T *to) {
    if constexpr (sizeof(T) == 2 && sizeof(A) == 4) {
      put(std::is_same<T, Bfloat16>::value ? to_bfloat16<Words>(x) : to_float16<Words>(x), to);
    } else {
      for (Index i = 0; i < WIDTH; ++i) round_to(x[i], to[i]);
    }
  }
  template <class T>
  INLINE static void put(Words words, T *to) {
    Halves bits = __builtin_convertvector(words, Halves);
    std::memcpy(to, &bits, sizeof bits);
  }
  INLINE Lanes operator+(const Lanes &other) const {
    Lanes x;
    for (Index i = 0; i < COUNT; ++i) x.v[i] = v[i] + other.v[i];
    return x;
  }
  INLINE Lanes operator-(const Lanes &other) const {
    Lanes x;
    for (Index i = 0; i < COUNT; ++i) x.v[i] = v[i] - other.v[i];
    return x;
  }
  INLINE Lanes operator*(A factor) const {
    Lanes x;
    for (Index i = 0; i < COUNT; ++i) x.v[i] = v[i] * factor;
    return x;
  }
  // 0 where it or the other is not finite.
  INLINE Lanes where_finite(const Lanes &other) const {
    Lanes x;
    for (Index i = 0; i < COUNT; ++i) x.v[i] = other.v[i] - other.v[i] == Native{} ? v[i] : Native{};
    return x;
  }
  INLINE Lanes square() const {
    Lanes x;
    for (Index i = 0; i < COUNT; ++i) x.v[i] = v[i] * v[i];
    return x;
  }
  // As gradients, under the inverse roots of a row and of columns.
  INLINE Lanes update(A root, Lanes x, A cap) const {
    for (Index i = 0; i < COUNT; ++i) {
      Native inverse = root * x.v[i], limit = Native{} + cap;
      x.v[i] = v[i] * (limit < inverse ? limit : inverse);
    }
    return x;
  }
  INLINE A sum() const {
    A x[16];
    store(x);
    for (Index width = 8; width > 0; width /= 2)
      for (Index i = 0; i < width; ++i) x[i] += x[i + width];
    return x[0];
  }
};

// Calls f with the start and the size of each run of a range, from several streams in turn.
template <class F>
INLINE void in_streams(Index first, Index last, Index streams, const F &f) {
  Index length = cut(last - first, streams * RUN) * RUN;
  for (Index i = 0; i < length; i += RUN)
    for (Index start = first + i; start < last; start += length) f(start, std::min(RUN, last - start));
}

// The sum of squares of at most CHUNK numbers.
template <class A, class T>
INLINE A sum_of_squares(const T *x, Index size) {
  Lanes<A> sums[4] = {Lanes<A>::zero(), Lanes<A>::zero(), Lanes<A>::zero(), Lanes<A>::zero()};
  Index i = 0;
  for (; i + 64 <= size; i += 64)
    for (Index k = 0; k < 4; ++k) sums[k] = sums[k] + Lanes<A>::load(x + i + 16 * k).square();
  for (; i + 16 <= size; i += 16) sums[0] = sums[0] + Lanes<A>::load(x + i).square();
  if (i < size) sums[1] = sums[1] + Lanes<A>::load(x + i, size - i).square();
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])).sum();
}

// observe

// The squares of ROWS rows times unscale, summed along each into rows, and over them into cols. m is at most CHUNK.
template <Index ROWS, class A, class T>
INLINE void observe_rows(const T *g, Index stride, Index m, A unscale, A *rows, A *cols) {
  Lanes<A> sums[ROWS];
  for (Index r = 0; r < ROWS; ++r) sums[r] = Lanes<A>::zero();
  auto add = [&](auto &&load, Lanes<A> below) {
    Lanes<A> squares[ROWS];
    for (Index r = 0; r < ROWS; ++r) {
      squares[r] = (load(g + r * stride) * unscale).square();
      sums[r] = sums[r] + squares[r];
    }
    for (Index width = ROWS / 2; width > 0; width /= 2)
      for (Index r = 0; r < width; ++r) squares[r] = squares[r] + squares[r + width];
    return below + squares[0];
  };
  Index j = 0;
  for (; j + 16 <= m; j += 16) {
    // The hardware fetches ahead within a page; the next rows are on others.
    for (Index r = 0; r < ROWS; ++r) __builtin_prefetch(g + (r + ROWS) * stride + j);
    add([&](const T *x) { return Lanes<A>::load(x + j); }, Lanes<A>::load(cols + j)).store(cols + j);
  }
  Index rest = m - j;
  if (rest > 0)
    add([&](const T *x) { return Lanes<A>::load(x + j, rest); }, Lanes<A>::load(cols + j, rest)).store(cols + j, rest);
  for (Index r = 0; r < ROWS; ++r) rows[r] += sums[r].sum();
}

// n rows of m columns, at most STRIP.
template <class A, class T>
void observe_matrix(const T *g, Index stride, Index n, Index m, A unscale, A *rows, A *cols) {
  assert(m <= STRIP);
  double total[STRIP];
  std::fill(rows, rows + n, A(0));
  std::fill(total, total + m, 0.0);
  for (Index start = 0; start < n; start += FLUSH) {
    Index i = start, end = std::min(start + FLUSH, n);
    std::fill(cols, cols + m, A(0));
    for (; i + 4 <= end; i += 4)
      for (Index j = 0; j < m; j += CHUNK)
        observe_rows<4>(g + i * stride + j, stride, std::min(m - j, CHUNK), unscale, rows + i, cols + j);
    for (; i < end; ++i)
      for (Index j = 0; j < m; j += CHUNK)
        observe_rows<1>(g + i * stride + j, stride, std::min(m - j, CHUNK), unscale, rows + i, cols + j);
    if (n > FLUSH)
      for (Index j = 0; j < m; ++j) total[j] += cols[j];
  }
  if (n > FLUSH)
    for (Index j = 0; j < m; ++j) cols[j] = A(total[j]);
}

// count matrices, one behind the other, of n rows of m columns, fewer than 16.
template <class A, class T>
void observe_narrow(const T *g, Index count, Index n, Index m, A unscale, A *rows, A *cols) {
  A squares[CHUNK];
  double total[16] = {};
  Index all = count * n, step = CHUNK / m, left = n;
  for (Index start = 0; start < all; start += step) {
    Index end = std::min(start + step, all), size = (end - start) * m;
    for (Index e = 0; e < size; ++e) {
      A x = A(value(g[start * m + e])) * unscale;
      squares[e] = x * x;
    }
    const A *square = squares;
    for (Index i = start; i < end; ++i) {
      A sum = 0;
      for (Index j = 0; j < m; ++j) {
        sum += *square;
        total[j] += *square++;
      }
      rows[i] = sum;
      if (--left == 0) {
        for (Index j = 0; j < m; ++j) {
          *cols++ = A(total[j]);
          total[j] = 0;
        }
        left = n;
      }
    }
  }
}

// The sum of p^2.
template <class A>
double observe_parameter(const Batch &batch, const Tile &tile) {
  const Shape &s = batch.shapes[tile.tensor];
  double sum = 0;
  with(s.p, [&](auto *type) {
    using T = std::remove_reference_t<decltype(*type)>;
    const T *p = static_cast<const T *>(batch.tensors[tile.tensor].p) + tile.first * s.m + tile.j0;
    in_streams(0, tile.size(), STREAMS, [&](Index start, Index size) { sum += sum_of_squares<A>(p + start, size); });
  });
  return sum;
}

// Whether all numbers are finite.
template <class A>
INLINE bool is_finite(const A *x, Index size) {
  A sum = 0;
  for (Index i = 0; i < size; ++i) sum += x[i] * 0;
  return sum == 0;
}

// What is looked at in a gradient beside the sums of its rows and columns.
struct Look {
  double sum;  // of |g|^2
  bool finite;

  void add(const Look &other) {
    sum += other.sum;
    finite = finite && other.finite;
  }
};

// The sum of numbers that are not negative, and whether they are all finite.
template <class A>
INLINE Look look(const A *squares, Index size) {
  double sums[16] = {};
  Index i = 0;
  for (; i + 16 <= size; i += 16)
    for (Index k = 0; k < 16; ++k) sums[k] += squares[i + k];
  for (; i < size; ++i) sums[0] += squares[i];
  double sum = 0;
  for (double each : sums) sum += each;
  return {sum, is_finite(squares, size)};
}

// A gradient without factors.
template <class A>
Look look_at_full_gradient(const Batch &batch, const Tile &tile) {
  const Shape &s = batch.shapes[tile.tensor];
  A unscale = batch.template number<A>(UNSCALE, tile.tensor);
  Look found{0, true};
  with(s.g, [&](auto *type) {
    using T = std::remove_reference_t<decltype(*type)>;
    const T *g = static_cast<const T *>(batch.tensors[tile.tensor].g) + tile.j0;
    A squares[RUN];
    for (Index start = 0; start < tile.size(); start += RUN) {
      Index size = std::min(tile.size() - start, RUN);
      for (Index i = 0; i < size; ++i) {
        A x = A(value(g[start + i])) * unscale;
        squares[i] = x * x;
      }
      found.add(look(squares, size));
    }
  });
  return found;
}

template <class A>
void observe_gradient(const Batch &batch, const Place &at, const Tile &tile) {
  const Shape &s = batch.shapes[tile.tensor];
  Index b = tile.first / s.n, i = tile.first % s.n, block = i / at.block, strip = tile.j0 / at.strip;
  A *scratch = static_cast<A *>(batch.scratch);
  A *rows = at.strips > 1 ? scratch + at.row_parts : rows_of<A>(batch, at, tile.tensor);
  A *cols = at.blocks > 1 ? scratch + at.col_parts : cols_of<A>(batch, at, tile.tensor);
  rows += (b * at.strips + strip) * s.n + i;
  cols += (b * at.blocks + block) * s.m + tile.j0;
  with(s.g, [&](auto *type) {
    using T = std::remove_reference_t<decltype(*type)>;
    const T *g = static_cast<const T *>(batch.tensors[tile.tensor].g) + tile.first * s.m + tile.j0;
    Index n = std::min(tile.last - tile.first, s.n), count = (tile.last - tile.first) / n, m = tile.j1 - tile.j0;
    A unscale = batch.template number<A>(UNSCALE, tile.tensor);
    if (s.m < 16) return observe_narrow(g, count, n, m, unscale, rows, cols);
    for (Index k = 0; k < count; ++k)
      observe_matrix(g + k * n * m, s.m, n, m, unscale, rows + k * n, cols + k * m);
  });
}

// The sums of the first tiles, for each tensor in the tiles' order, to out[k].
template <class A>
void total(const Batch &batch, const std::vector<Tile> &tiles, const std::vector<double> &parts, void *out) {
  std::vector<double> sums(batch.k, 0.0);
  for (size_t i = 0; i < parts.size(); ++i) sums[tiles[i].tensor] += parts[i];
  for (Index t = 0; t < batch.k; ++t) static_cast<A *>(out)[t] = A(sums[t]);
}

// The sums of count vectors, one behind the other.
template <class A>
void combine(const A *parts, Index count, Index size, A *sums) {
  for (Index start = 0; start < size; start += CHUNK) {
    Index width = std::min(size - start, CHUNK);
    double total[CHUNK] = {};
    for (Index i = 0; i < count; ++i)
      for (Index j = 0; j < width; ++j) total[j] += parts[i * size + start + j];
    for (Index j = 0; j < width; ++j) sums[start + j] = A(total[j]);
  }
}

template <class A>
void observe_batch(const Batch &batch) {
  std::vector<Place> places;
  arrange(batch, places);
  std::vector<Tile> tiles;
  if (batch.p2) tiles = pieces(batch);
  // So that apply begins with those that were read last.
  std::reverse(tiles.begin(), tiles.end());
  Index of_p = Index(tiles.size());
  if (batch.looks_at_gradients())
    for (const Tile &tile : pieces(batch, false)) tiles.push_back(tile);
  Index of_full = Index(tiles.size());
  for (const Tile &tile : blocks(batch, places)) tiles.push_back(tile);
  std::vector<double> parts(of_p);
  std::vector<Look> looks(of_full - of_p);
  over(tiles, batch.threads, false, [&](const Tile &tile, Index index) {
    if (index < of_p)
      parts[index] = observe_parameter<A>(batch, tile);
    else if (index < of_full)
      looks[index - of_p] = look_at_full_gradient<A>(batch, tile);
    else
      observe_gradient<A>(batch, places[tile.tensor], tile);
  });
  if (batch.p2) total<A>(batch, tiles, parts, batch.p2);
  std::vector<Look> found(batch.looks_at_gradients() ? batch.k : 0, Look{0, true});
  for (Index i = of_p; i < of_full; ++i) found[tiles[i].tensor].add(looks[i - of_p]);
  // The sums of strips and blocks into those of the tensor.
  A *scratch = static_cast<A *>(batch.scratch);
  std::vector<Tile> all = matrices(batch);
  looks.assign(all.size(), Look{0, true});
  over(all, batch.threads, false, [&](const Tile &tile, Index index) {
    const Shape &s = batch.shapes[tile.tensor];
    const Tensor &tensor = batch.tensors[tile.tensor];
    const Place &at = places[tile.tensor];
    A *rows = rows_of<A>(batch, at, tile.tensor), *cols = cols_of<A>(batch, at, tile.tensor);
    for (Index b = tile.first; b < tile.last; ++b) {
      if (at.strips > 1) combine(scratch + at.row_parts + b * at.strips * s.n, at.strips, s.n, rows + b * s.n);
      if (at.blocks > 1) combine(scratch + at.col_parts + b * at.blocks * s.m, at.blocks, s.m, cols + b * s.m);
      if (tensor.totals) {
        A *totals = static_cast<A *>(tensor.totals);
        const A *C = static_cast<const A *>(s.swapped ? tensor.R : tensor.C);
        Index size = s.swapped ? s.n : s.m;
        totals[b] = s.speaks ? A(look(C + b * size, size).sum) : A(0);
        totals[s.batch + b] = A(look(rows + b * s.n, s.n).sum);
      }
    }
    if (batch.looks_at_gradients()) {
      Index b = tile.first, count = tile.last - tile.first;
      looks[index] = look(rows + b * s.n, count * s.n);
      looks[index].finite = looks[index].finite && is_finite(cols + b * s.m, count * s.m);
    }
  });
  if (batch.looks_at_gradients())
    for (size_t i = 0; i < all.size(); ++i) found[all[i].tensor].add(looks[i]);
  for (Index t = 0; t < Index(found.size()); ++t) {
    if (batch.bad) batch.bad[t] = !found[t].finite;
    if (batch.g2) static_cast<A *>(batch.g2)[t] = A(found[t].sum);
  }
}

// average

// As torch does it: a weight of 1 gives exactly the end, and the product is not rounded.
template <class A>
INLINE A lerp(A from, A to, A weight) {
  return weight < A(0.5) ? std::fma(weight, to - from, from) : std::fma(weight - 1, to - from, to);
}

// 1 / sqrt x, but nan of an infinite x: 0 would stop the parameter in silence, for ever.
template <class A>
INLINE A inverse_root(A x) {
  return 1 / std::sqrt(x) + 0 * x;
}

// Not more than the cap; nan stays nan.
template <class A>
INLINE A capped(A x, A cap) {
  return cap < x ? cap : x;
}

// Takes sums over count numbers, times shrink, into a statistic, and leaves their means, with e, in place of the sums.
template <class A>
INLINE void take_in(A *statistic, A *sums, Index size, A count, A shrink, A b, A e) {
  for (Index i = 0; i < size; ++i) {
    sums[i] = sums[i] * shrink / count + e;
    statistic[i] = lerp(statistic[i], sums[i], b);
  }
}

template <class A>
INLINE A mean(const A *x, Index size) {
  double sum = 0;
  for (Index i = 0; i < size; ++i) sum += x[i];
  return A(sum / size);
}

// A statistic over a mean, where this step's means were. boost is infinite where it is no limit.
template <class A>
INLINE void divide(const A *statistic, A mean, A boost, Index size, A *means) {
  for (Index i = 0; i < size; ++i) {
    A least = means[i] / boost / boost;
    means[i] = (statistic[i] < least ? least : statistic[i]) / mean;
  }
}

template <class A>
void average_batch(const Batch &batch) {
  std::vector<Place> places;
  arrange(batch, places);
  over(matrices(batch), batch.threads, false, [&](const Tile &tile, Index) {
    Index t = tile.tensor;
    if (batch.holds(t)) return;
    const Shape &s = batch.shapes[t];
    const Tensor &tensor = batch.tensors[t];
    A b = batch.template number<A>(B, t), e = batch.template number<A>(ADDED, t);
    A floor = batch.template number<A>(FLOOR, t), boost = batch.template number<A>(BOOST, t);
    A shrink = batch.template number<A>(SHRINK, t);
    Index count = tile.last - tile.first;
    A *R = static_cast<A *>(tensor.R) + tile.first * s.n, *r = rows_of<A>(batch, places[t], t) + tile.first * s.n;
    A *C = static_cast<A *>(tensor.C) + tile.first * s.m, *c = cols_of<A>(batch, places[t], t) + tile.first * s.m;
    take_in(R, r, count * s.n, A(s.columns), shrink, b, e);
    take_in(C, c, count * s.m, A(s.rows), shrink, b, e);
    const A *totals = static_cast<const A *>(tensor.totals);
    for (Index k = 0; k < count; ++k) {
      A average;
      if (totals) {
        A before = totals[tile.first + k] / A(s.swapped ? s.rows : s.columns);
        A now = totals[s.batch + tile.first + k] * shrink / A(s.rows) / A(s.columns) + e;
        average = lerp(before, now, b);
      } else {
        average = s.swapped ? mean(R + k * s.n, s.n) : mean(C + k * s.m, s.m);
      }
      average = average < floor ? floor : average;
      divide(R + k * s.n, s.swapped ? A(1) : average, s.limited ? boost : std::numeric_limits<A>::infinity(), s.n, r + k * s.n);
      divide(C + k * s.m, s.swapped ? average : A(1), s.limited ? std::numeric_limits<A>::infinity() : boost, s.m, c + k * s.m);
    }
    for (Index i = 0; i < count * s.n; ++i) r[i] = inverse_root(r[i]);
    for (Index j = 0; j < count * s.m; ++j) c[j] = inverse_root(c[j]);
  });
}

// measure and apply

// Goes over a tile in runs of at most RUN elements, from several streams in turn: calls row with the gradient, the
// inverse roots of R, times unscale, and C, and where it begins and how long it is for each piece of a row, or full with
// the gradient, the start and the size of the run, and then end with the start and the size of the run.
template <class A, class Row, class Full, class End>
INLINE void walk(const Batch &batch, const Place &at, const Tile &tile, Index streams, const Row &row,
                 const Full &full, const End &end) {
  const Shape &s = batch.shapes[tile.tensor];
  with(s.g, [&](auto *type) {
    using T = std::remove_reference_t<decltype(*type)>;
    const T *g = static_cast<const T *>(batch.tensors[tile.tensor].g);
    if (!s.factored) {
      in_streams(tile.j0, tile.j1, streams, [&](Index start, Index size) {
        full(g + start, start, size);
        end(start, size);
      });
      return;
    }
    const A *r = rows_of<A>(batch, at, tile.tensor), *c = cols_of<A>(batch, at, tile.tensor);
    const A unscale = batch.template number<A>(UNSCALE, tile.tensor);
    Index m = tile.j1 - tile.j0;
    if (s.m < RUN) {
      assert(m == s.m);
      Index left = s.n - tile.first % s.n, rows = RUN / m;
      c += tile.first / s.n * m;
      for (Index i = tile.first; i < tile.last; i += rows) {
        rows = std::min(rows, tile.last - i);
        for (Index k = i; k < i + rows; ++k) {
          row(g + k * m, r[k] * unscale, c, k * m, m);
          if (--left == 0) {
            c += m;
            left = s.n;
          }
        }
        end(i * m, rows * m);
      }
      return;
    }
    Index rows = cut(tile.last - tile.first, streams);
    for (Index i = tile.first; i < tile.first + rows; ++i)
      for (Index j = tile.j0; j < tile.j1; j += RUN)
        for (Index k = i; k < tile.last; k += rows) {
          Index start = k * s.m + j, size = std::min(tile.j1 - j, RUN);
          row(g + start, r[k] * unscale, c + k / s.n * s.m + j, start, size);
          end(start, size);
        }
  });
}

// step times u, of one piece of a row.
template <class A, class T>
INLINE void row_updates(const T *g, A root, const A *roots, Index size, A cap, A step, A *u) {
  for (Index i = 0; i < size; ++i) u[i] = A(value(g[i])) * capped(root * roots[i], cap) * step;
}

// step times u, without factors.
template <class A, class T>
INLINE void full_updates(const T *g, A unscale, const A *V, Index size, A cap, A step, A *u) {
  for (Index i = 0; i < size; ++i) u[i] = A(value(g[i])) * unscale * capped(inverse_root(V[i]), cap) * step;
}

template <class A>
void measure_batch(const Batch &batch) {
  std::vector<Place> places;
  arrange(batch, places);
  std::vector<Tile> tiles = pieces(batch);
  std::vector<double> parts(tiles.size());
  over(tiles, batch.threads, true, [&](const Tile &tile, Index index) {
    Index t = tile.tensor;
    if (batch.holds(t)) return;
    A *V = static_cast<A *>(batch.tensors[t].V);
    bool narrow = batch.shapes[t].factored && batch.shapes[t].m < 16;
    A b = batch.template number<A>(B, t), e = batch.template number<A>(ADDED, t);
    A unscale = batch.template number<A>(UNSCALE, t), full_cap = batch.template number<A>(CAP, t);
    A cap = full_cap * unscale;
    A u[RUN];
    double sum = 0;
    Index unread = 0;
    Lanes<A> sums[2] = {Lanes<A>::zero(), Lanes<A>::zero()};
    walk<A>(
        batch, places[t], tile, STREAMS,
        [&](auto *g, A root, const A *roots, Index, Index size) {
          if (narrow) return row_updates(g, root, roots, size, cap, A(1), u + (unread += size) - size);
          Index i = 0;
          for (; i + 32 <= size; i += 32)
            for (Index k = 0; k < 2; ++k) {
              Index j = i + 16 * k;
              sums[k] = sums[k] + Lanes<A>::load(g + j).update(root, Lanes<A>::load(roots + j), cap).square();
            }
          if (i + 16 <= size) {
            sums[0] = sums[0] + Lanes<A>::load(g + i).update(root, Lanes<A>::load(roots + i), cap).square();
            i += 16;
          }
          Index rest = size - i;
          // A row of zeros has an infinite root: by 0 it would make nan of what is no element.
          if (rest > 0)
            sums[1] = sums[1] +
                      Lanes<A>::load(g + i, rest).update(root, Lanes<A>::load(roots + i, rest, A(1)), cap).square();
        },
        [&](auto *g, Index start, Index size) {
          for (Index i = 0; i < size; ++i) {
            A x = A(value(g[i])) * unscale;
            V[start + i] = lerp(V[start + i], x * x + e, b);
          }
          full_updates(g, unscale, V + start, size, full_cap, A(1), u);
          sum += sum_of_squares<A>(u, size);
        },
        [&](Index, Index size) {
          if (narrow) {
            sum += sum_of_squares<A>(u, size);
            unread = 0;
          } else if ((unread += size) >= FLUSH * 16) {
            sum += (sums[0] + sums[1]).sum();
            sums[0] = sums[1] = Lanes<A>::zero();
            unread = 0;
          }
        });
    parts[index] = sum + (sums[0] + sums[1]).sum();
  });
  total<A>(batch, tiles, parts, batch.u2);
}

// Takes u into m, and m's value into u. In lower precision, before alpha: what m's type makes of both.
template <class A, class T>
INLINE void momentum(T *m, A *u, Index size, A keep1, bool rounded) {
  using Low = typename std::conditional<std::is_same<A, T>::value, A, float>::type;
  for (Index i = 0; i < size; ++i) {
    T low;
    if (rounded) {
      round_to(u[i], low);
      Low x = lerp(Low(value(m[i])), Low(value(low)), Low(keep1));
      round_to(x, low);
      u[i] = A(value(low));
    } else {
      u[i] = lerp(A(value(m[i])), u[i], keep1);
      round_to(u[i], low);
    }
    m[i] = low;
  }
}

// What is taken off a tensor: step u, or size times the momentum of it, and decay of p itself; see sizes in sweeps.py.
template <class A>
struct Size {
  A step, size, decay;
  bool still;
};

template <class A>
Size<A> size_of(const Batch &batch, Index t) {
  const Shape &s = batch.shapes[t];
  A numel = A(s.elements), alpha = batch.template number<A>(RHO, t), d = batch.template number<A>(D, t);
  if (batch.p2) {
    A rms = std::sqrt(static_cast<const A *>(batch.p2)[t] / numel), eps2 = batch.template number<A>(EPS2, t);
    alpha *= rms < eps2 ? eps2 : rms;
  }
  A clip = std::sqrt(static_cast<const A *>(batch.u2)[t] / numel) / d;
  if (clip < 1 || std::isinf(d)) clip = 1;
  Size<A> size{batch.template number<A>(SIGN, t) / clip, alpha, batch.template number<A>(DECAY, t),
               batch.still && batch.still[t]};
  if (batch.momentum != 2) size.step *= alpha;
  if (batch.decay == 2) size.decay *= alpha;
  return size;
}

// x less decay of it and less u; of a number or of lanes of them.
template <class A, class X>
INLINE X less(X x, X u, const Size<A> &taken, bool decays) {
  return (decays ? x - x * taken.decay : x) - u;
}

// Takes step u, and decay of p, off one piece of a row.
template <class A, class G, class P>
INLINE void apply_row(const G *g, A root, const A *roots, Index size, A cap, const Size<A> &taken, bool decays, P *p) {
  auto change = [&](Lanes<A> x, Lanes<A> g, Lanes<A> roots) {
    return less(x, g.update(root, roots, cap) * taken.step, taken, decays);
  };
  Index i = 0;
  for (; i + 16 <= size; i += 16) {
    __builtin_prefetch(reinterpret_cast<const char *>(g + i) + AHEAD);
    __builtin_prefetch(reinterpret_cast<const char *>(p + i) + AHEAD);
    change(Lanes<A>::load(p + i), Lanes<A>::load(g + i), Lanes<A>::load(roots + i)).store(p + i);
  }
  Index rest = size - i;
  if (rest > 0)
    change(Lanes<A>::load(p + i, rest), Lanes<A>::load(g + i, rest), Lanes<A>::load(roots + i, rest)).store(p + i, rest);
}

// Takes updates, and decay of p, off p, rounded stochastically or with a compensation where that is not null. There are
// draws for a multiple of 16 numbers; update gives those from i on, so many of them.
template <class P, class Update>
INLINE void apply_rounded(P *p, P *comp, Index size, const uint32_t *draws, const Size<float> &taken, bool decays,
                          const Update &update) {
  using F = Lanes<float>;
  auto change = [&](F x, F u) { return less(x, u, taken, decays); };
  Index i = 0;
  if (comp) {
    auto write = [&](F x, P *p, P *comp, const uint32_t *draws) {
      F rounded = x.rounded_to(p);
      (x - rounded).where_finite(rounded).store(comp, draws);
    };
    for (; i + 16 <= size; i += 16)
      write(change(F::load(p + i) + F::load(comp + i), update(i, 16)), p + i, comp + i, draws + i);
    if (i == size) return;
    P ps[16], comps[16];
    Index rest = size - i;
    write(change(F::load(p + i, rest) + F::load(comp + i, rest), update(i, rest)), ps, comps, draws + i);
    std::copy(ps, ps + rest, p + i);
    std::copy(comps, comps + rest, comp + i);
  } else {
    for (; i + 16 <= size; i += 16) change(F::load(p + i), update(i, 16)).store(p + i, draws + i);
    if (i == size) return;
    P ps[16];
    Index rest = size - i;
    change(F::load(p + i, rest), update(i, rest)).store(ps, draws + i);
    std::copy(ps, ps + rest, p + i);
  }
}

template <class A>
void apply_batch(const Batch &batch) {
  std::vector<Place> places;
  arrange(batch, places);
  over(pieces(batch), batch.threads, false, [&](const Tile &tile, Index) {
    Index t = tile.tensor;
    const Shape &s = batch.shapes[t];
    const Tensor &tensor = batch.tensors[t];
    const Size<A> taken = size_of<A>(batch, t);
    const A unscale = batch.template number<A>(UNSCALE, t), full_cap = batch.template number<A>(CAP, t);
    const A step = taken.step, cap = full_cap * unscale, keep1 = batch.template number<A>(KEEP1, t);
    if (batch.holds(t) || (taken.still && !batch.momentum)) return;
    const bool decays = batch.decay != 0, rounds = batch.counters && (s.p == BF16 || s.p == F16);
    static const Counter nowhere{0, 0, 1, {1}, {1}};
    Draws draws(rounds ? batch.counters[t] : nowhere, rounds ? uint32_t(batch.template number<A>(STEP, t)) : 0);
    uint32_t bits[RUN] = {};
    auto round = [&](auto *p, Index start, Index size, auto &&update) {
      draws.fill(start, size, bits);
      using P = std::remove_reference_t<decltype(*p)>;
      P *comp = tensor.comp ? static_cast<P *>(tensor.comp) + start : nullptr;
      apply_rounded(p, comp, size, bits, taken, decays, update);
    };
    auto none = [](auto &&...) {};
    if (s.factored && s.m >= 16 && !batch.momentum)
      return walk<A>(
          batch, places[t], tile, APPLY_STREAMS,
          [&](auto *g, A root, const A *roots, Index start, Index size) {
            with(s.p, [&](auto *type) {
              using T = std::remove_reference_t<decltype(*type)>;
              T *p = static_cast<T *>(tensor.p) + start;
              if constexpr (sizeof(T) == 2 && sizeof(A) == 4) {
                using F = Lanes<float>;
                if (rounds)
                  return round(p, start, size, [&](Index i, Index count) {
                    if (count < 16)
                      return F::load(g + i, count).update(root, F::load(roots + i, count), cap) * taken.step;
                    __builtin_prefetch(reinterpret_cast<const char *>(g + i) + AHEAD);
                    __builtin_prefetch(reinterpret_cast<const char *>(p + i) + AHEAD);
                    return F::load(g + i).update(root, F::load(roots + i), cap) * taken.step;
                  });
              }
              apply_row(g, root, roots, size, cap, taken, decays, p);
            });
          },
          none, none);
    A u[RUN];
    Index filled = 0;
    auto row = [&](auto *g, A root, const A *roots, Index, Index size) {
      row_updates(g, root, roots, size, cap, step, u + filled);
      filled += size;
    };
    auto full = [&](auto *g, Index start, Index size) {
      full_updates(g, unscale, static_cast<const A *>(tensor.V) + start, size, full_cap, step, u);
    };
    walk<A>(batch, places[t], tile, APPLY_STREAMS, row, full, [&](Index start, Index size) {
      filled = 0;
      if (taken.still && batch.momentum == 1) std::fill(u, u + size, A(0));
      if (batch.momentum) {
        with(s.moment, [&](auto *type) {
          using T = std::remove_reference_t<decltype(*type)>;
          momentum(static_cast<T *>(tensor.moment) + start, u, size, keep1, batch.momentum == 2);
        });
        if (taken.still) return;
        if (batch.momentum == 2)
          for (Index i = 0; i < size; ++i) u[i] *= taken.size;
      }
      with(s.p, [&](auto *type) {
        using T = std::remove_reference_t<decltype(*type)>;
        T *p = static_cast<T *>(tensor.p) + start;
        if constexpr (sizeof(T) == 2 && sizeof(A) == 4) {
          if (rounds)
            return round(p, start, size, [&](Index i, Index count) {
              return count < 16 ? Lanes<float>::load(u + i, count) : Lanes<float>::load(u + i);
            });
        }
        for (Index i = 0; i < size; ++i) {
          round_to(less(A(value(p[i])), u[i], taken, decays), p[i]);
        }
      });
    });
  });
}

#define FOR_BOTH(sweep) \
  void sweep(const Batch &batch) { batch.wide ? sweep##_batch<double>(batch) : sweep##_batch<float>(batch); }
FOR_BOTH(observe)
FOR_BOTH(average)
FOR_BOTH(measure)
FOR_BOTH(apply)
#undef FOR_BOTH

#define NAME_OF(isa) #isa
#define NAME(isa) NAME_OF(isa)
constexpr Sweeps sweeps{NAME(ISA), observe, average, measure, apply};
#undef NAME
#undef NAME_OF

}  // namespace ISA
}  // namespace

#endif
