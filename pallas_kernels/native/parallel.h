// Splitting work over a thread pool that belongs to somebody else: XLA's.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace jaxspec {

namespace detail {

template <class F>
class Job {
 public:
  Job(int64_t units, F work) : units_(units), work_(std::move(work)) {}

  void run() {
    for (;;) {
      int64_t unit = next_.fetch_add(1, std::memory_order_relaxed);
      if (unit >= units_) return;
      work_(unit);
      done_.fetch_add(1, std::memory_order_release);
    }
  }

  void wait() const {
    for (int spins = 0; done_.load(std::memory_order_acquire) < units_; spins++) {
      if (spins > 4000) {
        std::this_thread::yield();  // more threads than cores: the one waited for may need ours
      } else {
#if defined(__x86_64__)
        _mm_pause();
#endif
      }
    }
  }

 private:
  std::atomic<int64_t> next_{0}, done_{0};
  const int64_t units_;
  const F work_;
};

}  // namespace detail

// Call `work(i)` for every i below `units`, on this thread and up to `threads - 1` of the pool's.
//
// Units are handed out one by one and this thread takes part, so nothing waits for a thread that the pool has not got:
// several devices may share one pool, and a call that finds it busy does all the work by itself.
template <class Pool, class F>
void parallel(Pool& pool, int64_t threads, int64_t units, F work) {
  threads = std::min({threads, units, static_cast<int64_t>(pool.num_threads())});
  if (threads <= 1) {
    for (int64_t unit = 0; unit < units; unit++) work(unit);
    return;
  }
  // Shared: a helper that comes late finds nothing left to do, possibly after this function has returned.
  auto job = std::make_shared<detail::Job<F>>(units, std::move(work));
  for (int64_t i = 1; i < threads; i++) pool.Schedule([job] { job->run(); });
  job->run();
  job->wait();
}

// A buffer that a thread keeps between calls; its content is arbitrary. Each `Tag` has its own.
template <class Tag>
float* scratch(int64_t count) {
  // Aligned to cache lines: a vector that lies across two takes two loads.
  struct alignas(64) Line {
    float values[16];
  };
  thread_local std::vector<Line> lines;
  const size_t needed = static_cast<size_t>(count + 15) / 16;
  if (needed > lines.size()) lines = std::vector<Line>(needed);
  return lines.empty() ? nullptr : lines.data()->values;
}

}  // namespace jaxspec
