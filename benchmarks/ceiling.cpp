// The physical floor of a step's sweeps: only reading two arrays, and reading one and updating the other, with nothing
// else to do. For benchmarks/step.py, which compiles it for the machine that it runs on.
#include <algorithm>
#include <cstdint>
#include <cstring>

typedef float Lane __attribute__((vector_size(32)));
constexpr int64_t LANE = 8, RUN = 256, STREAMS = 4;

struct Work {
  const float *g;
  float *p;
  int64_t size, threads;
  float *sums;
  bool update;
};

static Lane load(const float *x) {
  Lane lane;
  std::memcpy(&lane, x, sizeof lane);
  return lane;
}

static void share(const Work &work, int64_t thread) {
  int64_t first = work.size * thread / work.threads / RUN * RUN, last = work.size * (thread + 1) / work.threads / RUN * RUN;
  int64_t length = ((last - first) / STREAMS + RUN - 1) / RUN * RUN;
  Lane sums[4] = {};
  // Several streams in turn, as the sweeps do: the hardware fetches ahead for each.
  for (int64_t i = 0; i < length; i += RUN)
    for (int64_t at = first + i; at < last; at += length)
      for (int64_t j = at; j < at + RUN; j += LANE) {
        if (work.update) {
          Lane p = load(work.p + j) - 1e-9f * load(work.g + j);
          std::memcpy(work.p + j, &p, sizeof p);
        } else {
          sums[j / LANE % 2] += load(work.g + j);
          sums[2 + j / LANE % 2] += load(work.p + j);
        }
      }
  for (int k = 0; k < 4; ++k) work.sums[thread] += sums[k][0];
}

extern "C" void sweep(void (*parallel_for)(int64_t, int64_t, int64_t, void (*)(int64_t, int64_t, void *), void *),
                      const float *g, float *p, int64_t size, int64_t threads, float *sums, int64_t update) {
  Work work{g, p, size, threads, sums, update != 0};
  parallel_for(0, threads, 1, [](int64_t begin, int64_t end, void *context) {
    for (int64_t i = begin; i < end; ++i) share(*static_cast<Work *>(context), i);
  }, &work);
}
