#include "parallel.h"

#include <algorithm>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace jaxspec {

void Job::run() {
  const int64_t own = threads_.fetch_add(1, std::memory_order_relaxed);
  for (int64_t i = own; i < own + shares_; i++) {
    const int64_t share = i % shares_, begin = units_ * share / shares_, end = units_ * (share + 1) / shares_;
    std::atomic<int64_t>& taken = taken_[8 * share];
    // Looked at first: shares that are done should not move between the caches of many threads.
    while (begin + taken.load(std::memory_order_relaxed) < end) {
      const int64_t unit = begin + taken.fetch_add(1, std::memory_order_relaxed);
      if (unit >= end) break;
      call_(work_, unit);
      done_.fetch_add(1, std::memory_order_release);
    }
  }
}

void Job::wait() const {
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

void run_parallel(ThreadPool& pool, int64_t threads, int64_t units, Job::Call call, const void* work) {
  if (threads > 1 && units > 1) threads = std::min({threads, units, pool.num_threads()});
  if (threads <= 1 || units <= 1) {
    for (int64_t unit = 0; unit < units; unit++) call(work, unit);
    return;
  }
  // Shared: a helper that comes late finds nothing left to do, possibly after this function has returned.
  auto job = std::make_shared<Job>(threads, units, call, work);
  for (int64_t i = 1; i < threads; i++) pool.schedule(job);
  job->run();
  job->wait();
}

}  // namespace jaxspec
