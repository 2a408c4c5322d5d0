// All sweeps over many shapes and types, each array in an allocation of exactly its size: for the sanitizers.
#include "../../src/adafactor/csrc/adafactor.cpp"

#include <cstdio>
#include <cstdlib>
#include <thread>

namespace {

// As torch's: a thread for each index.
int32_t with_threads(Index begin, Index end, Index, Callback f, void *context) {
  std::vector<std::thread> threads;
  for (Index i = begin; i < end; ++i) threads.emplace_back(f, i, i + 1, context);
  for (auto &thread : threads) thread.join();
  return 0;
}

struct Buffer {
  void *data;
  Buffer(Index size, Index type) {
    Index width = type == F64 ? 8 : type == F32 ? 4 : 2;
    data = size > 0 ? std::malloc(size * width) : nullptr;
    for (Index i = 0; i < size; ++i) {
      float x = float(std::rand() % 2000 - 1000) / 500;
      if (type == F64) static_cast<double *>(data)[i] = x;
      if (type == F32) static_cast<float *>(data)[i] = x;
      // Of any bits, nan and inf among them.
      if (width == 2) static_cast<uint16_t *>(data)[i] = uint16_t(std::rand());
    }
  }
  Buffer(const Buffer &) = delete;
  ~Buffer() { std::free(data); }
};

void step(Index batch_size, Index n, Index m, bool factored, Index p, Index g, Index moment, Index momentum,
          Index rounding, bool is_shard) {
  bool wide = p == F64;
  Index type = wide ? F64 : F32, k = 2, numel = batch_size * n * m;
  // Every other one is a shard of a tensor twice as long and wide.
  Index times = 1 + is_shard;
  Shape shape{batch_size, n, m, factored, momentum == 1, momentum != 2, p, g, moment, n * times, m * times,
              numel * times * times, momentum != 0};
  if (!factored) shape = {1, 1, numel, 0, 0, 0, p, g, moment, 1, numel, numel, 1};
  Shape shapes[2] = {shape, {1, 1, 5, 0, 0, 0, p, g, moment, 1, 5, 5, 1}};
  Buffer p0(numel, p), g0(numel, g), R(factored ? batch_size * n : 0, type), C(factored ? batch_size * m : 0, type);
  Buffer V(factored ? 0 : numel, type), m0(momentum ? numel : 0, moment);
  Buffer p1(5, p), g1(5, g), V1(5, type), m1(5, moment), numbers(14 * k, type), p2(k, type), g2(k, type), u2(k, type);
  bool has_sums = is_shard && factored;
  Buffer rows(has_sums ? batch_size * n : 0, type), cols(has_sums ? batch_size * m : 0, type);
  Buffer totals(has_sums ? 2 * batch_size : 0, type);
  Buffer c0(rounding == 2 ? numel : 0, p), c1(rounding == 2 ? 5 : 0, p);
  Tensor tensors[2] = {
      {p0.data, g0.data, R.data, C.data, V.data, m0.data, c0.data, rows.data, cols.data, totals.data},
      {p1.data, g1.data, nullptr, nullptr, V1.data, m1.data, c1.data, nullptr, nullptr, nullptr}};
  uint8_t still[2] = {0, 1}, hold[2] = {uint8_t(numel % 7 == 0), 0}, bad[2];
  // Across the border of the lower halves of the indices, rows and columns swapped.
  Counter counters[2] = {{7, (Index{1} << 32) - 3, 2, {n * batch_size, m}, {1, n * batch_size}}, {8, 0, 1, {5}, {1}}};
  // Step counts are no random numbers.
  for (Index i = 0; i < k; ++i)
    wide ? void(static_cast<double *>(numbers.data)[STEP * k + i] = 3)
         : void(static_cast<float *>(numbers.data)[STEP * k + i] = 3);
  Batch batch{k,     3,    wide, momentum,        numel % 3, shapes, tensors, rounding ? counters : nullptr,
              nullptr, numbers.data, k,  still, hold, numel % 2 ? bad : nullptr, p2.data, numel % 3 ? g2.data : nullptr, u2.data};
  Buffer scratch(adafactor_scratch(&batch), type);
  batch.scratch = scratch.data;
  if (adafactor_observe(&batch) || adafactor_average(&batch) || adafactor_measure(&batch) || adafactor_apply(&batch))
    std::abort();
}

}  // namespace

int main() {
  adafactor_start(with_threads);
  const Index matrices[][3] = {{1, 1, 1},    {1, 1, 700},   {1, 700, 1},  {5, 3, 3},     {2, 17, 15},
                               {1, 64, 64},  {1, 33, 257},  {3, 300, 16}, {1, 4097, 50}, {1, 70, 4100},
                               {2, 9, 9000}, {1, 3, 70000}, {2, 300, 700}, {1, 8, 5120},  {1, 1, 5000}, {1, 2, 65546},
                               {9, 2, 5000}};
  Index count = 0;
  for (Index isa = 0; adafactor_isa(isa) != nullptr; ++isa) {
    adafactor_choose(isa);
    for (const auto &shape : matrices)
      for (Index factored = 0; factored < 2; ++factored)
        for (Index momentum = 0; momentum < 3; ++momentum) {
          Index p = count % 3, g = count / 3 % 3, moment = count / 9 % 3;
          Index rounding = count % 4 % 3;
          step(shape[0], shape[1], shape[2], factored, p, g, moment, momentum, rounding, count % 2);
          if (count++ % 5 == 0) step(shape[0], shape[1], shape[2], factored, F64, F64, F64, momentum, rounding, count % 2);
        }
  }
  // Threads that fail are no success.
  adafactor_start([](Index, Index, Index, Callback, void *) -> int32_t { return 1; });
  Shape large{1, 400, 400, 1, 0, 0, F32, F32, F32, 400, 400, 160000, 1};
  Buffer p(160000, F32), g(160000, F32), R(400, F32), C(400, F32), numbers(14, F32), u2(1, F32);
  Tensor tensor{p.data, g.data, R.data, C.data, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
  Batch failing{};
  failing.k = 1;
  failing.threads = 2;
  failing.shapes = &large;
  failing.tensors = &tensor;
  failing.numbers = numbers.data;
  failing.stride = 1;
  failing.u2 = u2.data;
  Buffer scratch(adafactor_scratch(&failing), F32);
  failing.scratch = scratch.data;
  if (adafactor_observe(&failing) != 2) std::abort();
  float a = 1, b = 2, t[2];
  float *steps[2] = {&a, &b};
  adafactor_count(2, steps, t);
  adafactor_keep(2, steps, t);
  if (a != 2 || b != 3) std::abort();
  std::printf("%lld steps, counts %g and %g\n", static_cast<long long>(count), t[0], t[1]);
}
