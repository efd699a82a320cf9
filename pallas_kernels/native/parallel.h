// Splitting work over a thread pool that belongs to somebody else: XLA's.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace jaxspec {

namespace detail {

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Threads of a pool that work for one call after the other. To wake a thread takes longer than many a call: a helper
// looks out for the next call for a moment before it goes back to the pool.
class Crew {
 public:
  // Call `work(i)` for every i below `units`, on this thread and up to `helpers` others; false if the crew has work
  // already. Only helpers that are there take part: a pool that is busy delays nothing.
  template <class Pool, class F>
  bool run(Pool& pool, int64_t helpers, int64_t units, const F& work) {
    if (busy_.exchange(true, std::memory_order_acquire)) return false;
    call_ = [](const void* own, int64_t unit) { (*static_cast<const F*>(own))(unit); };
    work_ = &work;
    units_ = units;
    next_.store(0, std::memory_order_relaxed);
    round_.fetch_add(1);
    for (int64_t missing = helpers - present_.load(); missing > 0; missing--) {
      present_.fetch_add(1);
      pool.Schedule([this] { help(); });
    }
    take_units();
    round_.fetch_add(1);
    for (int spins = 0; inside_.load(); spins++) {
      if (spins > 4000) {
        std::this_thread::yield();  // more threads than cores: the one waited for may need ours
      } else {
        relax();
      }
    }
    busy_.store(false, std::memory_order_release);
    return true;
  }

 private:
  // How often a helper looks before it goes: for 10 to 50 us, longer than what lies between two calls of a pass.
  static constexpr int kPatience = 1000;

  void help() {
    uint64_t done = 0;
    for (int idle = 0;;) {
      const uint64_t round = round_.load();
      if (is_open(round) && round != done) {
        inside_.fetch_add(1);
        // The caller closes the round, then waits for those inside: whoever sees it open here may touch its work.
        if (round_.load() == round) take_units();
        inside_.fetch_sub(1);
        done = round;
        idle = 0;
      } else if (++idle > kPatience) {
        present_.fetch_sub(1);
        // A call that began just now counted on this thread.
        const uint64_t last = round_.load();
        if (!is_open(last) || last == done) return;
        present_.fetch_add(1);
        idle = 0;
      } else {
        relax();
      }
    }
  }

  void take_units() {
    for (;;) {
      const int64_t unit = next_.fetch_add(1, std::memory_order_relaxed);
      if (unit >= units_) return;
      call_(work_, unit);
    }
  }

  static bool is_open(uint64_t round) { return round % 2; }

  std::atomic<bool> busy_{false};
  // Helpers that the pool was asked for and that did not go back yet.
  std::atomic<int64_t> present_{0};
  // Of the call under way; others may read it while they are inside of an open round.
  void (*call_)(const void*, int64_t) = nullptr;
  const void* work_ = nullptr;
  int64_t units_ = 0;
  // In lines of their own: helpers look at `round_` all the time.
  alignas(64) std::atomic<uint64_t> round_{0};  // odd while a call's work may be taken
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int64_t> inside_{0};
};

// Devices that compute at the same time have a crew each.
constexpr int kCrews = 8;
inline Crew* crews() {
  static Crew all[kCrews];
  return all;
}

}  // namespace detail

// Call `work(i)` for every i below `units`, on this thread and up to `threads - 1` of the pool's.
//
// Units are handed out one by one and this thread takes part, so nothing waits for a thread that the pool has not got:
// several devices may share one pool, and a call that finds it busy does all the work by itself.
template <class Pool, class F>
void parallel(Pool& pool, int64_t threads, int64_t units, const F& work) {
  threads = std::min({threads, units, static_cast<int64_t>(pool.num_threads())});
  for (int i = 0; threads > 1 && i < detail::kCrews; i++)
    if (detail::crews()[i].run(pool, threads - 1, units, work)) return;
  for (int64_t unit = 0; unit < units; unit++) work(unit);
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
