// Splitting work over a thread pool that belongs to somebody else: XLA's.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace jaxspec {

// Work in units that several threads take one by one: first those of a share, so that a thread reads memory that lies
// together and what it fetches ahead is its own, then those that are left of other shares.
class Job {
 public:
  using Call = void (*)(const void* work, int64_t unit);

  Job(int64_t shares, int64_t units, Call call, const void* work)
      : shares_(shares), taken_(static_cast<size_t>(8 * shares)), units_(units), call_(call), work_(work) {}

  void run();
  void wait() const;

 private:
  const int64_t shares_;
  std::vector<std::atomic<int64_t>> taken_;  // units of each share, a cache line apart
  std::atomic<int64_t> threads_{0}, done_{0};
  const int64_t units_;
  const Call call_;
  const void* const work_;
};

class ThreadPool {
 public:
  virtual int64_t num_threads() const = 0;
  // Call `job->run()` on one of the threads, some time.
  virtual void schedule(std::shared_ptr<Job> job) = 0;

 protected:
  ~ThreadPool() = default;
};

void run_parallel(ThreadPool& pool, int64_t threads, int64_t units, Job::Call call, const void* work);

// Call `work(i)` for every i below `units`, on this thread and up to `threads - 1` of the pool's.
//
// Units are handed out one by one and this thread takes part, so nothing waits for a thread that the pool has not got:
// several devices may share one pool, and a call that finds it busy does all the work by itself.
template <class F>
void parallel(ThreadPool& pool, int64_t threads, int64_t units, const F& work) {
  run_parallel(
      pool, threads, units, [](const void* f, int64_t unit) { (*static_cast<const F*>(f))(unit); }, &work);
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
