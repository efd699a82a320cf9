#include "parallel.h"

#include <algorithm>
#include <chrono>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace jaxspec {
namespace {

// The pool takes several microseconds to hand a job to a thread, as long as a small product takes. So a thread that has
// done its part waits here for the next job: so long after the last one, and so long in all, since the pool may have
// other work for it.
constexpr auto kStay = std::chrono::microseconds(50), kLongestStay = std::chrono::microseconds(2000);

struct alignas(64) Seat {
  enum State { kEmpty, kWaiting, kClaimed, kGiven };
  std::atomic<State> state{kEmpty};
  std::shared_ptr<Job> job;  // belongs to whoever changed the state to kClaimed, and to the waiting thread once kGiven

  bool change(State from, State to) { return state.compare_exchange_strong(from, to, std::memory_order_acquire); }
};

constexpr int kSeats = 64;
// Never destroyed: threads of the pool may outlive static objects.
Seat* const seats = new Seat[kSeats];
std::atomic<int> waiting{0};  // about how many threads do
std::atomic<int64_t> coming{0};  // jobs that the pool was given and no thread has begun

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Give `job` to up to `threads` waiting threads; returns to how many.
int64_t give(const std::shared_ptr<Job>& job, int64_t threads) {
  int64_t given = 0;
  for (int i = 0; i < kSeats && given < threads && waiting.load(std::memory_order_relaxed) > 0; i++) {
    Seat& seat = seats[i];
    if (seat.state.load(std::memory_order_relaxed) != Seat::kWaiting) continue;
    if (!seat.change(Seat::kWaiting, Seat::kClaimed)) continue;
    waiting.fetch_sub(1, std::memory_order_relaxed);
    seat.job = job;
    seat.state.store(Seat::kGiven, std::memory_order_release);
    given++;
  }
  return given;
}

// Wait for jobs and run them.
void sit(Seat& seat) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  waiting.fetch_add(1, std::memory_order_relaxed);
  for (auto last = begin;;) {
    // Looking at the clock takes as long as many looks at the seat.
    for (int spins = 0; spins < 16 && seat.state.load(std::memory_order_acquire) != Seat::kGiven; spins++) pause();
    if (seat.state.load(std::memory_order_acquire) == Seat::kGiven) {
      const std::shared_ptr<Job> job = std::move(seat.job);
      job->run();
      seat.state.store(Seat::kWaiting, std::memory_order_release);
      waiting.fetch_add(1, std::memory_order_relaxed);
      last = Clock::now();
    }
    const auto now = Clock::now();
    if ((now - last > kStay || now - begin > kLongestStay) && seat.change(Seat::kWaiting, Seat::kEmpty)) {
      waiting.fetch_sub(1, std::memory_order_relaxed);
      return;
    }
  }
}

}  // namespace

void Job::run() {
  int64_t done = 0;
  for (;; done++) {
    const int64_t unit = next_.fetch_add(1, std::memory_order_relaxed);
    if (unit >= units_) break;
    call_(work_, unit);
  }
  if (done > 0) done_.fetch_add(done, std::memory_order_release);
}

void Job::wait() const {
  for (int spins = 0; done_.load(std::memory_order_acquire) < units_; spins++) {
    if (spins > 4000) std::this_thread::yield();  // more threads than cores: the one waited for may need ours
    else pause();
  }
}

void serve(std::shared_ptr<Job> job) {
  coming.fetch_sub(1, std::memory_order_relaxed);
  job->run();
  job.reset();
  for (int i = 0; i < kSeats; i++)
    if (seats[i].change(Seat::kEmpty, Seat::kWaiting)) return sit(seats[i]);
}

void run_parallel(ThreadPool& pool, int64_t threads, int64_t units, Job::Call call, const void* work) {
  if (threads > 1 && units > 1) threads = std::min({threads, units, pool.num_threads()});
  if (threads <= 1 || units <= 1) {
    for (int64_t unit = 0; unit < units; unit++) call(work, unit);
    return;
  }
  // Shared: a helper that comes late finds nothing left to do, possibly after this function has returned.
  const auto job = std::make_shared<Job>(units, call, work);
  for (int64_t i = 1 + give(job, threads - 1); i < threads; i++) {
    // Where the pool is busy, more threads that come too late would only take time from it.
    if (coming.load(std::memory_order_relaxed) >= threads - 1) break;
    coming.fetch_add(1, std::memory_order_relaxed);
    pool.schedule(job);
  }
  job->run();
  job->wait();
}

}  // namespace jaxspec
