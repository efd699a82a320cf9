// Random shapes and lengths against the cores of the native kernels; tools/fuzz_native.py builds and runs it.
//
//     fuzz FIRST COUNT
//
// runs the cases FIRST to FIRST + COUNT - 1 and prints a digest of all results. A case follows from its number alone,
// so `fuzz NUMBER 1` repeats one that failed. Each runs an operation on buffers of exactly their size, compares it with
// an oracle in double precision, and its bits with those of the same work done on one thread, in parts, or elsewhere.
//
// FUZZ_PRODUCTS, a list of formats, compiles what works on weights and rows, FUZZ_ATTENTION attention; neither: all.

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "../../pallas_kernels/linear/packed_product.h"
#include "../../pallas_kernels/linear/product.h"
#include "../../pallas_kernels/linear/weight_format.cc"
#include "../../pallas_kernels/native/parallel.cc"
#include "../../pallas_kernels/rms_norm/rms_norm.cc"
#include "../../pallas_kernels/row_top/row_top.cc"
#include "../../pallas_kernels/tree_attention/attention.cc"

#if !defined(FUZZ_PRODUCTS) && !defined(FUZZ_ATTENTION)
#define FUZZ_PRODUCTS Float32, BFloat16, Float16, Q8_0, Q4_0, Q4_1, Q5_0, Q4_K, Q6_K
#define FUZZ_ATTENTION
#endif

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define FUZZ_SANITIZED
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define FUZZ_SANITIZED
#endif
#endif
#if defined(FUZZ_SANITIZED)
extern "C" void __sanitizer_set_death_callback(void (*callback)());
#endif

namespace jaxspec {

// The tables of formats, by files; this program has those that it names.
extern const FormatList kNumbers = {}, kGgufBlocks = {}, kMoreGgufBlocks = {}, kGroupBlocks = {}, kPackedGguf8 = {},
                        kPackedGguf16 = {}, kPackedK8 = {}, kPackedK16 = {}, kPackedGroups8 = {}, kPackedGroups16 = {};

namespace {

constexpr double kRounding = 0x1p-24;  // largest relative error of one float32 operation

// ---- Failing

char current_case[512] = "no case";

void print_case() {
  const char* parts[] = {"failed: ", current_case, "\n"};
  for (const char* part : parts)
    if (write(STDERR_FILENO, part, std::strlen(part)) < 0) return;
}

void print_case_and_die(int signal_number) {
  print_case();
  signal(signal_number, SIG_DFL);
  raise(signal_number);
}

// Say which case it was, however the program ends.
void watch_for_death() {
  signal(SIGABRT, print_case_and_die);
#if defined(FUZZ_SANITIZED)
  __sanitizer_set_death_callback(print_case);
#else
  for (int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) signal(number, print_case_and_die);
#endif
}

int64_t case_number = 0;

__attribute__((format(printf, 1, 2))) void describe(const char* format, ...) {
  const int used = std::snprintf(current_case, sizeof current_case, "case %lld: ", static_cast<long long>(case_number));
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(current_case + used, sizeof current_case - used, format, arguments);
  va_end(arguments);
}

[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fputs("\n", stderr);
  std::fflush(stderr);
  print_case();
  _exit(1);
}

// ---- Chance

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  // Both ends included.
  int64_t range(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(next() % static_cast<uint64_t>(high - low + 1));
  }
  bool one_in(int64_t n) { return range(1, n) == 1; }
  // Small sizes are as likely as all others together: most bounds are met there.
  int64_t size(int64_t most) { return range(1, one_in(2) ? std::min<int64_t>(most, 9) : most); }
  // In [-1, 1).
  float number() { return static_cast<float>(static_cast<int32_t>(next() >> 40) - (1 << 23)) * 0x1p-23f; }

 private:
  uint64_t state_;
};

// ---- Memory

// `count` elements, and not a byte more: what lies before or behind them is AddressSanitizer's or a page without
// access, which also stops the masked loads and stores that AddressSanitizer does not see. Aligned to `alignment` and,
// as a rule, to no more. Filled with 0xFF: NaN, as float32 and as bfloat16.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(Random& random, int64_t count, int64_t alignment = sizeof(T)) : count_(count), alignment_(alignment) {
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    if (random.one_in(2)) {
      const size_t shift = static_cast<size_t>(random.range(0, 64 / alignment) * alignment);
      auto* memory = static_cast<uint8_t*>(std::malloc(shift + bytes));
      memory_.reset(memory, std::free);
      data_ = reinterpret_cast<T*>(memory + shift);
    } else {
      const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), inner = (bytes + page - 1) / page * page;
      const size_t whole = inner + 2 * page;
      void* memory = mmap(nullptr, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (memory == MAP_FAILED) fail("no memory");
      memory_.reset(memory, [whole](void* p) { munmap(p, whole); });
      uint8_t* start = static_cast<uint8_t*>(memory) + page;
      if (inner && mprotect(start, inner, PROT_READ | PROT_WRITE)) fail("no memory");
      data_ = reinterpret_cast<T*>(random.one_in(4) ? start : start + inner - bytes);
    }
    if (bytes) std::memset(static_cast<void*>(data_), 0xFF, bytes);
  }

  T* data() const { return data_; }
  T& operator[](int64_t i) const { return data_[i]; }
  int64_t count() const { return count_; }

  // The same elements elsewhere.
  Buffer part(Random& random, int64_t first, int64_t count) const {
    Buffer other(random, count, alignment_);
    if (count) std::memcpy(other.data_, data_ + first, static_cast<size_t>(count) * sizeof(T));
    return other;
  }
  Buffer copy(Random& random) const { return part(random, 0, count_); }

 private:
  std::shared_ptr<void> memory_;
  T* data_ = nullptr;
  int64_t count_ = 0, alignment_ = 1;
};

Buffer<float> random_floats(Random& random, int64_t count, float largest = 1) {
  Buffer<float> x(random, count);
  for (int64_t i = 0; i < count; i++) x[i] = random.number() * largest;
  return x;
}

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return x == x ? bits : 0x7FC00000;  // one NaN is as good as another
}

void expect_same_bits(const char* what, const float* a, const float* b, int64_t count) {
  for (int64_t i = 0; i < count; i++)
    if (bits_of(a[i]) != bits_of(b[i]))
      fail("%s: element %lld is %a, was %a", what, static_cast<long long>(i), a[i], b[i]);
}

void expect_same_bytes(const char* what, const uint8_t* a, const uint8_t* b, int64_t count) {
  for (int64_t i = 0; i < count; i++)
    if (a[i] != b[i]) fail("%s: byte %lld is %d, was %d", what, static_cast<long long>(i), a[i], b[i]);
}

void expect_close(const char* what, int64_t i, double value, double expected, double tolerance) {
  if (!(std::fabs(value - expected) <= tolerance))
    fail("%s: element %lld is %.9g, not %.9g +- %.2g", what, static_cast<long long>(i), value, expected, tolerance);
}

uint64_t digest = 0xCBF29CE484222325u;

void record(const Buffer<float>& results) {
  for (int64_t i = 0; i < results.count(); i++) digest = (digest ^ bits_of(results[i])) * 0x100000001B3u;
}

// ---- Threads

// A pool with the interface that XLA's has. While it is held, no work starts.
class Pool final : public ThreadPool {
 public:
  explicit Pool(int threads) {
    for (int i = 0; i < threads; i++) threads_.emplace_back([this] { run(); });
  }
  // What is left is done first.
  ~Pool() {
    hold(false);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ends_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  int64_t num_threads() const override { return static_cast<int64_t>(threads_.size()); }
  void schedule(std::shared_ptr<Job> work) override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      work_.push_back(std::move(work));
    }
    changed_.notify_one();
  }
  void hold(bool held) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      held_ = held;
    }
    changed_.notify_all();
  }

 private:
  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return (!held_ && !work_.empty()) || ends_; });
      if (work_.empty()) return;
      {
        std::shared_ptr<Job> work = std::move(work_.front());
        work_.pop_front();
        lock.unlock();
        work->run();
      }
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Job>> work_;
  std::vector<std::thread> threads_;
  bool held_ = false, ends_ = false;
};

struct Case {
  Random random;
  Pool& pool;
  int64_t threads;
};

void fuzz_parallel(Case& c) {
  const int64_t units = c.random.range(0, 200), calls = 20;
  const bool together = c.random.one_in(2);
  describe("parallel, %lld units%s", static_cast<long long>(units), together ? ", two callers" : "");
  const auto call_often = [&] {
    for (int64_t call = 0; call < calls; call++) {
      std::vector<int> done(static_cast<size_t>(units));
      parallel(c.pool, c.threads, units, [&](int64_t i) { done[static_cast<size_t>(i)]++; });
      for (int times : done)
        if (times != 1) fail("a unit was done %d times", times);
    }
  };
  if (!together) return call_often();
  std::thread other(call_often);
  call_often();
  other.join();
}

// ---- Lanes and rows of numbers

void fuzz_lanes(Case& c) {
  describe("lanes");
  Lanes all[kLanes];
  for (Lanes& lanes : all) lanes = load(random_floats(c.random, kLanes).data());
  Buffer<float> together(c.random, kLanes);
  store(together.data(), sums(all));
  for (int i = 0; i < kLanes; i++) {
    Buffer<float> own(c.random, kLanes);
    store(own.data(), all[i]);
    double expected = 0, size = 0;
    for (int j = 0; j < kLanes; j++) expected += own[j], size += std::fabs(own[j]);
    const float alone = sum(all[i]);
    expect_same_bits("sums", &together[i], &alone, 1);
    expect_close("sum", i, alone, expected, 4 * kRounding * size);
  }
  for (int n = 1; n <= kLanes; n++) {
    Buffer<float> x = random_floats(c.random, n), y(c.random, n), padded(c.random, kLanes);
    store(padded.data(), load(x.data(), n));
    for (int i = 0; i < kLanes; i++)
      if (padded[i] != (i < n ? x[i] : 0)) fail("load of %d numbers: lane %d is %g", n, i, padded[i]);
    store(y.data(), load(x.data(), n), n);
    expect_same_bits("store", y.data(), x.data(), n);
    store(padded.data(), keep_first(set(3), n, set(5)));
    for (int i = 0; i < kLanes; i++)
      if (padded[i] != (i < n ? 3 : 5)) fail("keep_first of %d: lane %d is %g", n, i, padded[i]);
  }
  Buffer<float> x = random_floats(c.random, kLanes, c.random.one_in(2) ? 1.0f : 100.0f), y(c.random, kLanes);
  x[c.random.range(0, kLanes - 1)] = NAN;
  x[c.random.range(0, kLanes - 1)] = c.random.one_in(2) ? INFINITY : -INFINITY;
  store(y.data(), exp(load(x.data())));
  for (int i = 0; i < kLanes; i++) {
    if (x[i] != x[i]) {
      if (y[i] == y[i]) fail("exp of NaN is %g", y[i]);
      continue;
    }
    const double expected = std::exp(static_cast<double>(std::clamp(x[i], -87.3f, 88.3f)));
    expect_close("exp", i, y[i], expected, 2 * std::ldexp(1.0, std::ilogb(expected) - 23));
  }
}

void fuzz_rms_norm(Case& c) {
  const int64_t rows = c.random.size(80), width = c.random.size(600);
  describe("rms_norm, rows %lld, width %lld", static_cast<long long>(rows), static_cast<long long>(width));
  const float epsilon = 1e-5f;
  const Buffer<float> x = random_floats(c.random, rows * width, c.random.one_in(2) ? 1.0f : 1e-3f);
  const Buffer<float> scale = random_floats(c.random, width), y(c.random, rows * width);
  if (c.random.one_in(4)) std::memset(x.data(), 0, static_cast<size_t>(width) * sizeof(float));
  rms_norm(x.data(), scale.data(), epsilon, rows, width, y.data());
  record(y);
  for (int64_t r = 0; r < rows; r++) {
    double squares = 0;
    for (int64_t i = 0; i < width; i++) squares += static_cast<double>(x[r * width + i]) * x[r * width + i];
    const double factor = 1 / std::sqrt(squares / static_cast<double>(width) + epsilon);
    for (int64_t i = 0; i < width; i++) {
      const double expected = x[r * width + i] * factor * scale[i];
      const double steps = static_cast<double>(width) / 16 + 12;
      expect_close("rms_norm", r * width + i, y[r * width + i], expected, steps * kRounding * std::fabs(expected) + 1e-37);
    }
  }
  const int64_t r = c.random.range(0, rows - 1);
  const Buffer<float> row(c.random, width);
  rms_norm(x.part(c.random, r * width, width).data(), scale.copy(c.random).data(), epsilon, 1, width, row.data());
  expect_same_bits("row alone", row.data(), y.data() + r * width, width);
}

void fuzz_row_top(Case& c) {
  const int64_t rows = c.random.size(12), columns = c.random.size(40000), most = c.random.range(1, std::min<int64_t>(columns, 40));
  describe("row_top, rows %lld, columns %lld, most %lld", static_cast<long long>(rows), static_cast<long long>(columns),
           static_cast<long long>(most));
  Buffer<float> x = random_floats(c.random, rows * columns, c.random.one_in(2) ? 1.0f : 30.0f);
  const float odd[] = {NAN, INFINITY, -INFINITY, 0.0f, -0.0f, 1.0f};
  for (int64_t i = c.random.range(0, 40); i > 0; i--) x[c.random.range(0, rows * columns - 1)] = odd[c.random.range(0, 5)];
  const Buffer<float> best(c.random, rows * most), total(c.random, rows);
  const Buffer<int32_t> column(c.random, rows * most);
  row_top(c.pool, c.threads, x.data(), rows, columns, most, best.data(), column.data(), total.data());
  record(best);
  record(total);
  for (int64_t r = 0; r < rows; r++) {
    const auto value = [&](int64_t i) {
      const float own = x[r * columns + i];
      return own == own ? std::min(own, std::numeric_limits<float>::max()) : -INFINITY;
    };
    std::vector<int32_t> order(static_cast<size_t>(columns));
    for (size_t i = 0; i < order.size(); i++) order[i] = static_cast<int32_t>(i);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return value(a) > value(b); });
    for (int64_t i = 0; i < most; i++) {
      const int32_t expected = order[static_cast<size_t>(i)];
      if (column[r * most + i] != expected || best[r * most + i] != value(expected))
        fail("row_top: place %lld is column %d", static_cast<long long>(i), column[r * most + i]);
    }
    const double top = std::max<double>(value(order[0]), -std::numeric_limits<float>::max());
    double sum = 0;
    for (int64_t i = 0; i < columns; i++) sum += std::exp(value(i) - top);
    const double expected = top + std::log(std::max(sum, 1.0));
    expect_close("row_top's total", r, total[r], expected, 1e-5 + 4 * kRounding * std::fabs(expected));
  }
  const int64_t r = c.random.range(0, rows - 1);
  const Buffer<float> own(c.random, most), own_total(c.random, 1);
  const Buffer<int32_t> own_column(c.random, most);
  row_top(c.pool, c.threads, x.part(c.random, r * columns, columns).data(), 1, columns, most, own.data(),
          own_column.data(), own_total.data());
  expect_same_bits("row alone", own.data(), best.data() + r * most, most);
  expect_same_bits("row's total alone", own_total.data(), total.data() + r, 1);
}

// ---- Formats, decoded as ggml documents them

double half_at(const uint8_t* p) {
  const int bits = p[0] | p[1] << 8, exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double sign = bits >> 15 ? -1 : 1;
  if (exponent == 31) return fraction ? NAN : sign * INFINITY;
  return sign * (exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24));
}

double float_of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

void decode_float32(const uint8_t* p, double* out) {
  *out = float_of_bits(p[0] | p[1] << 8 | p[2] << 16 | static_cast<uint32_t>(p[3]) << 24);
}
void decode_bfloat16(const uint8_t* p, double* out) {
  *out = float_of_bits(static_cast<uint32_t>(p[0]) << 16 | static_cast<uint32_t>(p[1]) << 24);
}
void decode_float16(const uint8_t* p, double* out) { *out = half_at(p); }

void decode_q8_0(const uint8_t* p, double* out) {
  for (int i = 0; i < 32; i++) out[i] = half_at(p) * static_cast<int8_t>(p[2 + i]);
}
void decode_q4_0(const uint8_t* p, double* out) {
  for (int i = 0; i < 16; i++) {
    out[i] = half_at(p) * ((p[2 + i] & 15) - 8);
    out[i + 16] = half_at(p) * ((p[2 + i] >> 4) - 8);
  }
}
void decode_q4_1(const uint8_t* p, double* out) {
  for (int i = 0; i < 16; i++) {
    out[i] = half_at(p) * (p[4 + i] & 15) + half_at(p + 2);
    out[i + 16] = half_at(p) * (p[4 + i] >> 4) + half_at(p + 2);
  }
}
void decode_q5_0(const uint8_t* p, double* out) {
  for (int i = 0; i < 32; i++) {
    const int low = i < 16 ? p[6 + i] & 15 : p[6 + i - 16] >> 4, high = p[2 + i / 8] >> i % 8 & 1;
    out[i] = half_at(p) * (low + 16 * high - 16);
  }
}
void decode_q4_k(const uint8_t* p, double* out) {
  const uint8_t* packed = p + 4;
  for (int part = 0; part < 8; part++) {
    int scale, minimum;
    if (part < 4) {
      scale = packed[part] & 63;
      minimum = packed[part + 4] & 63;
    } else {
      scale = (packed[part + 4] & 0xF) | ((packed[part - 4] >> 6) << 4);
      minimum = (packed[part + 4] >> 4) | ((packed[part] >> 6) << 4);
    }
    for (int i = 0; i < 32; i++) {
      const uint8_t both = p[16 + part / 2 * 32 + i];
      out[part * 32 + i] = half_at(p) * scale * (part % 2 ? both >> 4 : both & 15) - half_at(p + 2) * minimum;
    }
  }
}
void decode_q6_k(const uint8_t* p, double* out) {
  for (int half = 0; half < 2; half++) {
    const uint8_t *low = p + 64 * half, *high = p + 128 + 32 * half, *scales = p + 192 + 8 * half;
    for (int i = 0; i < 32; i++) {
      const int codes[4] = {(low[i] & 15) | (high[i] & 3) << 4, (low[i + 32] & 15) | (high[i] >> 2 & 3) << 4,
                            low[i] >> 4 | (high[i] >> 4 & 3) << 4, low[i + 32] >> 4 | (high[i] >> 6) << 4};
      for (int part = 0; part < 4; part++)
        out[128 * half + 32 * part + i] =
            half_at(p + 208) * static_cast<int8_t>(scales[2 * part + i / 16]) * (codes[part] - 32);
    }
  }
}

struct Format {
  const char* name;
  int64_t values, bytes;
  void (*decode)(const uint8_t*, double*);
  std::vector<int> halves;  // where a block has float16 numbers
};

Format format_of(Float32) { return {"float32", 1, 4, decode_float32, {}}; }
Format format_of(BFloat16) { return {"bfloat16", 1, 2, decode_bfloat16, {}}; }
Format format_of(Float16) { return {"float16", 1, 2, decode_float16, {0}}; }
Format format_of(Q8_0) { return {"q8_0", 32, 34, decode_q8_0, {0}}; }
Format format_of(Q4_0) { return {"q4_0", 32, 18, decode_q4_0, {0}}; }
Format format_of(Q4_1) { return {"q4_1", 32, 20, decode_q4_1, {0, 2}}; }
Format format_of(Q5_0) { return {"q5_0", 32, 22, decode_q5_0, {0}}; }
Format format_of(Q4_K) { return {"q4_k", 256, 144, decode_q4_k, {0, 2}}; }
Format format_of(Q6_K) { return {"q6_k", 256, 210, decode_q6_k, {208}}; }

struct Weight {
  Buffer<uint8_t> data;
  int64_t outputs, inputs, row_bytes;
  bool finite;

  Matrix matrix(const Buffer<uint8_t>& where) const { return {where.data(), outputs, inputs, row_bytes}; }
};

void put_float(uint8_t* p, float x, int bytes) {  // the first `bytes` from above
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  for (int i = 0; i < bytes; i++) p[i] = static_cast<uint8_t>(bits >> (32 - 8 * bytes + 8 * i));
}

// Blocks lie at any address, numbers at multiples of their size.
Weight random_weight(Random& random, const Format& format, int64_t outputs, int64_t inputs) {
  const int64_t row_bytes = inputs / format.values * format.bytes;
  Weight w{Buffer<uint8_t>(random, outputs * row_bytes, format.values == 1 ? format.bytes : 1), outputs, inputs,
           row_bytes, !random.one_in(8)};
  for (int64_t i = 0; i < w.data.count(); i++) w.data[i] = static_cast<uint8_t>(random.next() >> 56);
  if (!w.finite) return w;
  const int64_t most = random.one_in(4) ? 30 : 18;  // exponent; 15 is that of 1
  for (int64_t i = 0; i < w.data.count(); i += format.bytes) {
    if (format.values == 1 && format.halves.empty())
      put_float(&w.data[i], std::ldexp(random.number(), static_cast<int>(random.range(-4, 4))),
                static_cast<int>(format.bytes));
    for (int at : format.halves) {
      uint8_t& high = w.data[i + at + 1];
      high = static_cast<uint8_t>((high & 0x83) | random.range(0, most) << 2);
    }
  }
  return w;
}

std::vector<double> decode(const Format& format, const Weight& w) {
  std::vector<double> values(static_cast<size_t>(w.outputs * w.inputs));
  for (int64_t i = 0; i < w.outputs * w.inputs / format.values; i++)
    format.decode(w.data.data() + i * format.bytes, values.data() + i * format.values);
  return values;
}

int64_t random_inputs(Random& random, const Format& format) {
  return format.values == 1 ? random.size(600) : format.values * random.range(1, 4);
}

#if defined(FUZZ_PRODUCTS)

// ---- Rows of a weight

void take(const Format& format, const Matrix& w, const int32_t* index, int64_t rows, float* y) {
  static const WeightFormat formats[] = {
      float_format<Float32>("float32"), float_format<BFloat16>("bfloat16"), float_format<Float16>("float16"),
      float_format<Q8_0>("q8_0"),       float_format<Q4_0>("q4_0"),         float_format<Q4_1>("q4_1"),
      float_format<Q5_0>("q5_0"),       float_format<Q4_K>("q4_k"),         float_format<Q6_K>("q6_k")};
  for (const WeightFormat& own : formats) {
    if (own.name != format.name) continue;
    for (int64_t r = 0; r < rows; r++) own.unpack(w, index[r], y + r * w.inputs);
    return;
  }
  fail("no format %s", format.name);
}

void fuzz_take_rows(Case& c) {
  const std::vector<Format> formats = {format_of(Float32()), format_of(BFloat16()), format_of(Float16()),
                                       format_of(Q8_0()),    format_of(Q4_0()),     format_of(Q4_1()),
                                       format_of(Q5_0()),    format_of(Q4_K()),     format_of(Q6_K())};
  const Format& format = formats[static_cast<size_t>(c.random.range(0, static_cast<int64_t>(formats.size()) - 1))];
  const int64_t rows = c.random.size(40), outputs = c.random.size(100), inputs = random_inputs(c.random, format);
  describe("take_rows of %s, rows %lld, outputs %lld, inputs %lld", format.name, static_cast<long long>(rows),
           static_cast<long long>(outputs), static_cast<long long>(inputs));
  const Weight w = random_weight(c.random, format, outputs, inputs);
  const Buffer<int32_t> index(c.random, rows);
  for (int64_t r = 0; r < rows; r++) index[r] = static_cast<int32_t>(c.random.range(0, outputs - 1));
  const Buffer<float> y(c.random, rows * inputs);
  take(format, w.matrix(w.data), index.data(), rows, y.data());
  record(y);
  if (!w.finite) return;
  const std::vector<double> values = decode(format, w);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = 0; i < inputs; i++) {
      const auto expected = static_cast<float>(values[static_cast<size_t>(index[r] * inputs + i)]);
      if (!(y[r * inputs + i] == expected))
        fail("row %lld, weight %lld: %a, not %a", static_cast<long long>(r), static_cast<long long>(i),
             y[r * inputs + i], expected);
    }
}

// ---- Products

struct Products {
  Format format;
  WeightFormat own;

  void run(bool gated, Pool& pool, int64_t threads, const float* x, int64_t rows, const Matrix& w, float* y) const {
    (gated ? swiglu : linear)(own, pool, threads, x, rows, w, y);
  }
};

template <class... Formats>
std::vector<Products> products_of() {
  return {{format_of(Formats()), float_format<Formats>(format_of(Formats()).name)}...};
}

const std::vector<Products>& all_products() {
  static const std::vector<Products> products = products_of<FUZZ_PRODUCTS>();
  return products;
}

struct Dot {
  double value, error;  // largest that float32 arithmetic may have
};

Dot dot(const float* x, const double* w, int64_t count) {
  double value = 0, size = 0;
  for (int64_t i = 0; i < count; i++) value += x[i] * w[i], size += std::fabs(x[i] * w[i]);
  // Two roundings a step where there is no fused product, and four for the lanes; a weight is rounded once.
  return {value, (static_cast<double>(count) / 8 + 8) * kRounding * size + 1e-36};
}

void fuzz_product(Case& c) {
  const auto& products = all_products();
  const Products& kind = products[static_cast<size_t>(c.random.range(0, static_cast<int64_t>(products.size()) - 1))];
  const bool gated = c.random.one_in(3), tall = c.random.one_in(8);
  const int64_t rows = c.random.size(80), outputs = c.random.size(100) + (tall ? 500 : 0);
  const int64_t inputs = tall ? kind.format.values : random_inputs(c.random, kind.format);
  describe("%s of %s, rows %lld, outputs %lld, inputs %lld, threads %lld", gated ? "swiglu" : "linear",
           kind.format.name, static_cast<long long>(rows), static_cast<long long>(outputs),
           static_cast<long long>(inputs), static_cast<long long>(c.threads));
  const Weight w = random_weight(c.random, kind.format, gated ? 2 * outputs : outputs, inputs);
  const Buffer<float> x = random_floats(c.random, rows * inputs), y(c.random, rows * outputs);
  kind.run(gated, c.pool, c.threads, x.data(), rows, w.matrix(w.data), y.data());
  record(y);

  const Buffer<float> single(c.random, rows * outputs);
  const Buffer<uint8_t> moved = w.data.copy(c.random);
  kind.run(gated, c.pool, 1, x.copy(c.random).data(), rows, w.matrix(moved), single.data());
  expect_same_bits("one thread", single.data(), y.data(), rows * outputs);

  const int64_t first = c.random.range(0, rows - 1), few = c.random.one_in(2) ? 1 : c.random.range(1, rows - first);
  const Buffer<float> some(c.random, few * outputs);
  kind.run(gated, c.pool, c.threads, x.part(c.random, first * inputs, few * inputs).data(), few, w.matrix(moved),
           some.data());
  expect_same_bits("rows by themselves", some.data(), y.data() + first * outputs, few * outputs);
  if (!w.finite) return;

  for (const Products& plain : products) {
    if (std::string_view(plain.format.name) != "float32") continue;
    const Buffer<int32_t> index(c.random, w.outputs);
    for (int64_t i = 0; i < w.outputs; i++) index[i] = static_cast<int32_t>(i);
    const Buffer<float> numbers(c.random, w.outputs * inputs);
    take(kind.format, w.matrix(moved), index.data(), w.outputs, numbers.data());
    const Buffer<float> same(c.random, rows * outputs);
    const Matrix whole{reinterpret_cast<const uint8_t*>(numbers.data()), w.outputs, inputs, inputs * 4};
    plain.run(gated, c.pool, c.threads, x.data(), rows, whole, same.data());
    expect_same_bits("the weight in numbers", same.data(), y.data(), rows * outputs);
  }

  const std::vector<double> values = decode(kind.format, w);
  auto expect_pair = [&](int64_t r, int64_t o) {
    const float* row = x.data() + r * inputs;
    const Dot first_half = dot(row, values.data() + o * inputs, inputs);
    if (!gated) {
      expect_close("product", r * outputs + o, y[r * outputs + o], first_half.value, first_half.error);
      return;
    }
    const Dot up = dot(row, values.data() + (outputs + o) * inputs, inputs);
    const double g = first_half.value, silu = g / (1 + std::exp(-g)), expected = silu * up.value;
    // The slope of silu is at most 1.1. Where e^-g is cut, silu is nearly 0.
    const double gate_error = 1.1 * first_half.error + 1e-6 * std::fabs(silu) + 1e-37 * std::fabs(g);
    if (std::fabs(expected) > 1e37) return;
    expect_close("swiglu", r * outputs + o, y[r * outputs + o], expected,
                 gate_error * (std::fabs(up.value) + up.error) + std::fabs(silu) * up.error + 1e-36);
  };
  const int64_t pairs = rows * outputs, most = std::max<int64_t>(64, 60000 / inputs);
  for (int64_t i = 0; i < std::min(pairs, most); i++) {
    const int64_t pair = pairs <= most ? i : c.random.range(0, pairs - 1);
    expect_pair(pair / outputs, pair % outputs);
  }
}

#endif

// ---- Packed products

#if defined(FUZZ_PACKED)

template <class Format, int kPlanes>
void fuzz_packed_as(Case& c, const char* name) {
  const bool gated = c.random.one_in(3);
  const int64_t rows = c.random.size(80), outputs = c.random.size(100) * (gated ? 2 : 1), blocks = c.random.range(1, 5);
  const int64_t inputs = blocks * Format::kValues, columns = gated ? outputs / 2 : outputs;
  describe("%s of %s with %d bytes, rows %lld, outputs %lld, inputs %lld, threads %lld", gated ? "swiglu" : "linear", name,
           kPlanes, static_cast<long long>(rows), static_cast<long long>(outputs), static_cast<long long>(inputs),
           static_cast<long long>(c.threads));
  const Buffer<uint8_t> file(c.random, outputs * blocks * Format::kFileBytes, 1);
  for (int64_t i = 0; i < file.count(); i++) file[i] = static_cast<uint8_t>(c.random.next() >> 56);
  const Buffer<uint8_t> packed(c.random, outputs * blocks * Format::kBytes, 1);
  pack_rows<Format>(file.data(), outputs, blocks, packed.data());
  auto multiply = [&](int64_t threads, const float* x, int64_t count, const Buffer<uint8_t>& w, float* y) {
    const Matrix matrix{w.data(), outputs, inputs, blocks * Format::kBytes};
    constexpr WeightFormat own = packed_format<Format, kPlanes>("packed");
    (gated ? swiglu : linear)(own, c.pool, threads, x, count, matrix, y);
  };
  const Buffer<float> x = random_floats(c.random, rows * inputs), y(c.random, rows * columns);
  multiply(c.threads, x.data(), rows, packed, y.data());
  record(y);

  const Buffer<float> single(c.random, rows * columns);
  const Buffer<uint8_t> moved = packed.copy(c.random);
  multiply(1, x.copy(c.random).data(), rows, moved, single.data());
  expect_same_bits("one thread", single.data(), y.data(), rows * columns);

  const int64_t first = c.random.range(0, rows - 1), few = c.random.one_in(2) ? 1 : c.random.range(1, rows - first);
  const Buffer<float> some(c.random, few * columns);
  multiply(c.threads, x.part(c.random, first * inputs, few * inputs).data(), few, moved, some.data());
  expect_same_bits("rows by themselves", some.data(), y.data() + first * columns, few * columns);

  const Buffer<int32_t> index(c.random, 2);
  for (int64_t i = 0; i < 2; i++) index[i] = static_cast<int32_t>(c.random.range(0, outputs - 1));
  const Buffer<float> taken(c.random, 2 * inputs);
  for (int64_t i = 0; i < 2; i++)
    unpack_packed<Format>({packed.data(), outputs, inputs, blocks * Format::kBytes}, index[i], taken.data() + i * inputs);
  record(taken);
}

template <class... Formats>
void fuzz_packed_one_of(Case& c) {
  using Function = void (*)(Case&, const char*);
  static const Function functions[] = {fuzz_packed_as<Formats, 1>..., fuzz_packed_as<Formats, 2>...};
  const int64_t kind = c.random.range(0, 2 * static_cast<int64_t>(sizeof...(Formats)) - 1);
  static const std::string names[] = {"packed format " + std::to_string(Formats::kBits) + " bits"...};
  functions[kind](c, names[kind % static_cast<int64_t>(sizeof...(Formats))].c_str());
}

void fuzz_packed(Case& c) { fuzz_packed_one_of<FUZZ_PACKED>(c); }

#endif

// ---- Attention

#if defined(FUZZ_ATTENTION)

struct Element {
  const char* name;
  int64_t bytes;
  void (*decode)(const uint8_t*, double*);
  CacheType type;
};

const Element kElements[] = {{"float32", 4, decode_float32, CacheType::kFloat32},
                             {"bfloat16", 2, decode_bfloat16, CacheType::kBFloat16}};

// Everything that one call needs.
struct Scene {
  const Element* element;
  AttentionShape shape;
  Buffer<float> qkv, cos, sin;
  bool causal;
  Buffer<uint8_t> mask;  // of a causal scene: for reference only
  Buffer<int32_t> position;
  Buffer<uint8_t> key, value;
  Buffer<float> out;

  int64_t row_size() const { return shape.kv_heads * (shape.group + 2) * shape.width; }
  int64_t out_size() const { return shape.kv_heads * shape.group * shape.width; }
  int64_t slot_bytes() const { return shape.width * element->bytes; }
  uint8_t* key_at(int64_t k, int64_t slot) const { return key.data() + (k * shape.slots + slot) * slot_bytes(); }
  uint8_t* value_at(int64_t k, int64_t slot) const { return value.data() + (k * shape.slots + slot) * slot_bytes(); }

  // Prefix slots from there on, and marked window slots, are what row t sees.
  int64_t first_seen(int64_t t) const {
    if (!shape.sliding) return 0;
    return std::clamp<int64_t>(static_cast<int64_t>(position[t]) - shape.sliding + 1, 0, shape.length);
  }
  bool sees(int64_t t, int64_t slot) const {
    if (slot < shape.length) return slot >= first_seen(t);
    return slot - shape.length < shape.window && mask[t * shape.window + slot - shape.length];
  }

  const char* run(Pool& pool, int64_t threads, bool write_only = false) const {
    return tree_attention(element->type, pool, threads, shape, qkv.data(), cos.data(), sin.data(),
                          causal ? nullptr : mask.data(), causal ? nullptr : position.data(), key.data(), value.data(),
                          write_only ? nullptr : out.data());
  }
  // The same in other memory, with nothing in its result yet.
  Scene copy(Random& random) const { return rows(random, 0, shape.rows, causal); }
  // Some of the rows.
  Scene rows(Random& random, int64_t first, int64_t count, bool stays_causal = false) const {
    Scene s = *this;
    const int64_t half = shape.width / 2;
    s.causal = stays_causal;
    s.shape.rows = count;
    s.shape.offset = shape.offset + first;
    s.qkv = qkv.part(random, first * row_size(), count * row_size());
    s.cos = cos.part(random, first * half, count * half);
    s.sin = sin.part(random, first * half, count * half);
    s.mask = mask.part(random, first * shape.window, count * shape.window);
    s.position = position.part(random, first, count);
    s.key = key.copy(random);
    s.value = value.copy(random);
    s.out = Buffer<float>(random, count * out_size());
    return s;
  }
  void expect_same_cache(const char* what, const Scene& other) const {
    expect_same_bytes(what, other.key.data(), key.data(), key.count());
    expect_same_bytes(what, other.value.data(), value.data(), value.count());
  }
};

void put_number(const Scene& s, uint8_t* p, float x) { put_float(p, x, static_cast<int>(s.element->bytes)); }

void fill_cache(Random& random, const Scene& s) {
  for (int64_t k = 0; k < s.shape.kv_heads; k++) {
    for (int64_t slot = 0; slot < s.shape.slots; slot++) {
      bool seen = false;
      for (int64_t t = 0; t < s.shape.rows && !seen; t++) seen = s.sees(t, slot);
      if (!seen) continue;  // NaN
      for (int64_t h = 0; h < s.shape.width; h++) {
        put_number(s, s.key_at(k, slot) + h * s.element->bytes, random.number());
        put_number(s, s.value_at(k, slot) + h * s.element->bytes, random.number());
      }
    }
  }
}

double element_at(const Scene& s, const uint8_t* p, int64_t i) {
  double x;
  s.element->decode(p + i * s.element->bytes, &x);
  return x;
}

// The nearest number that the cache can hold.
double rounded(const Scene& s, float x) {
  if (!std::isfinite(x) || x == 0) return 0;
  if (s.element->bytes == 4) return x;
  const double unit = std::ldexp(1.0, std::max(std::ilogb(x), -126) - 7);
  return std::nearbyint(x / unit) * unit;
}

struct Rotated {
  double value, size;
};

Rotated rotated(const Scene& s, int64_t t, const float* head, int64_t h) {
  const int64_t half = s.shape.width / 2, pair = h % half;
  const double c = s.cos[t * half + pair], n = s.sin[t * half + pair];
  const double a = head[pair] * (h < half ? c : n), b = head[half + pair] * (h < half ? -n : c);
  return {a + b, std::fabs(a) + std::fabs(b)};
}

void expect_cache(const Scene& before, const Scene& after) {
  const AttentionShape& s = before.shape;
  const int64_t start = s.length + s.offset;
  for (int64_t k = 0; k < s.kv_heads; k++) {
    for (int64_t slot = 0; slot < s.slots; slot++) {
      if (slot < start || slot >= start + s.rows) {
        expect_same_bytes("key of another slot", after.key_at(k, slot), before.key_at(k, slot), before.slot_bytes());
        expect_same_bytes("value of another slot", after.value_at(k, slot), before.value_at(k, slot),
                          before.slot_bytes());
        continue;
      }
      const int64_t t = slot - start;
      const float* key = before.qkv.data() + ((t * s.kv_heads + k) * (s.group + 2) + s.group) * s.width;
      for (int64_t h = 0; h < s.width; h++) {
        const Rotated expected = rotated(before, t, key, h);
        const double coarse = before.element->bytes == 2 ? 0x1p-8 * std::fabs(expected.value) : 0;
        expect_close("key", slot * s.width + h, element_at(after, after.key_at(k, slot), h), expected.value,
                     3 * kRounding * expected.size + coarse + 1e-37);
        const double value = element_at(after, after.value_at(k, slot), h), kept = rounded(before, key[s.width + h]);
        if (value != kept)
          fail("value of slot %lld: %a, not %a", static_cast<long long>(slot), value, kept);
      }
    }
  }
}

// One query's result, from the cache as the kernel left it.
void expect_query(const Scene& s, int64_t t, int64_t k, int64_t g) {
  const int64_t H = s.shape.width;
  const float* head = s.qkv.data() + ((t * s.shape.kv_heads + k) * (s.shape.group + 2) + g) * H;
  std::vector<Rotated> query;
  for (int64_t h = 0; h < H; h++) query.push_back(rotated(s, t, head, h));
  std::vector<double> score;
  std::vector<int64_t> slots;
  double error = 0, largest = -INFINITY, total = 0;
  for (int64_t slot = 0; slot < s.shape.slots; slot++) {
    if (!s.sees(t, slot)) continue;
    double value = 0, size = 0;
    for (int64_t h = 0; h < H; h++) {
      const double key = element_at(s, s.key_at(k, slot), h);
      value += query[static_cast<size_t>(h)].value * key;
      size += query[static_cast<size_t>(h)].size * std::fabs(key);
    }
    const double scale = 1 / std::sqrt(static_cast<double>(H));
    slots.push_back(slot);
    score.push_back(value * scale);
    largest = std::max(largest, value * scale);
    error = std::max(error, (static_cast<double>(H) / 8 + 14) * kRounding * size * scale);
  }
  for (double& weight : score) total += weight = std::exp(weight - largest);
  for (int64_t h = 0; h < H; h++) {
    double expected = 0, size = 0;
    for (size_t i = 0; i < slots.size(); i++) {
      const double value = element_at(s, s.value_at(k, slots[i]), h);
      expected += score[i] / total * value;
      size += score[i] / total * std::fabs(value);
    }
    const int64_t at = ((t * s.shape.kv_heads + k) * s.shape.group + g) * H + h;
    expect_close("attention", at, s.out[at], expected, (4 * error + 2e-5) * size + 1e-34);
  }
}

// Row `t` alone, with the first `committed` tokens of its path as part of the prefix and the others behind it.
void expect_path_in_prefix(Case& c, const Scene& s, int64_t t, const std::vector<int64_t>& path, bool causal) {
  const auto depth = static_cast<int64_t>(path.size()) - 1;
  const int64_t committed = causal ? depth : c.random.range(0, depth);
  Scene own = s.rows(c.random, t, 1);
  own.shape.length = s.shape.length + committed;
  own.shape.offset = depth - committed;
  own.shape.window = depth - committed + 1 + c.random.range(0, 2);
  own.shape.slots = own.shape.length + own.shape.offset + 1 + c.random.range(0, 3);
  own.causal = causal;
  own.mask = Buffer<uint8_t>(c.random, own.shape.window);
  for (int64_t j = 0; j < own.shape.window; j++) {
    const int64_t at = committed + j;
    own.mask[j] = at <= depth && s.mask[t * s.shape.window + path[static_cast<size_t>(at)]];
  }
  own.position[0] = static_cast<int32_t>(s.shape.length + depth);
  own.key = own.value = Buffer<uint8_t>();
  const int64_t bytes = s.shape.kv_heads * own.shape.slots * s.slot_bytes();
  own.key = Buffer<uint8_t>(c.random, bytes, s.element->bytes);
  own.value = Buffer<uint8_t>(c.random, bytes, s.element->bytes);
  const auto one = static_cast<size_t>(s.slot_bytes());
  for (int64_t k = 0; k < s.shape.kv_heads; k++) {
    for (int64_t slot = 0; slot < s.shape.length + depth; slot++) {
      const int64_t from =
          slot < s.shape.length ? slot : s.shape.length + path[static_cast<size_t>(slot - s.shape.length)];
      std::memcpy(own.key_at(k, slot), s.key_at(k, from), one);
      std::memcpy(own.value_at(k, slot), s.value_at(k, from), one);
    }
  }
  if (own.run(c.pool, c.random.range(1, 3))) fail("the path in the prefix is refused");
  expect_same_bits("the path in the prefix", own.out.data(), s.out.data() + t * s.out_size(), s.out_size());
}

// A row of NaN reaches only those that see it.
void expect_contained(Case& c, const Scene& before, const Scene& after) {
  const int64_t broken = c.random.range(0, before.shape.rows - 1);
  Scene s = before.copy(c.random);
  for (int64_t i = 0; i < s.row_size(); i++)
    s.qkv[broken * s.row_size() + i] = c.random.one_in(2) ? NAN : c.random.one_in(2) ? INFINITY : -INFINITY;
  if (s.run(c.pool, c.threads)) fail("a row of NaN is refused");
  const int64_t slot = s.shape.length + s.shape.offset + broken;
  for (int64_t k = 0; k < s.shape.kv_heads; k++)
    for (int64_t h = 0; h < s.shape.width; h++)
      if (element_at(s, s.value_at(k, slot), h) != 0) fail("a row of NaN is in the cache's values");
  for (int64_t t = 0; t < s.shape.rows; t++) {
    if (t == broken || s.sees(t, slot)) continue;
    expect_same_bits("beside a row of NaN", s.out.data() + t * s.out_size(), after.out.data() + t * s.out_size(),
                     s.out_size());
  }
}

void expect_refusals(Case& c, const Scene& before) {
  const int64_t room = before.shape.slots - before.shape.length - before.shape.offset - before.shape.rows;
  for (int kind = 0; kind < 5; kind++) {
    Scene s = before.copy(c.random);
    const int64_t far = c.random.one_in(2) ? 1 : c.random.one_in(2) ? 1000 : INT32_MAX;
    if (kind == 0) s.shape.length += room + far;
    if (kind == 1) s.shape.offset += room + far;
    if (kind == 2) s.shape.length = -far;
    if (kind == 3) s.shape.offset = -far;
    if (kind == 4) {
      s.causal = false;
      s.shape.window = s.shape.slots - s.shape.length + c.random.range(1, 4);
      s.mask = Buffer<uint8_t>(c.random, s.shape.rows * s.shape.window);
      std::memset(s.mask.data(), 0, static_cast<size_t>(s.mask.count()));
      const int64_t t = c.random.range(0, s.shape.rows - 1);
      s.mask[t * s.shape.window + c.random.range(s.shape.slots - s.shape.length, s.shape.window - 1)] = 1;
    }
    const Buffer<float> blank = s.out.copy(c.random);
    if (!s.run(c.pool, c.threads)) fail("what cannot be computed is not refused (%d)", kind);
    before.expect_same_cache("the cache after a refusal", s);
    expect_same_bits("the result after a refusal", s.out.data(), blank.data(), blank.count());
  }
}

enum class Marks { kCausal, kTree, kAny };

// Marks of the window; `paths` get each row's window slots from the root on, where the rows form a tree.
void mark_window(Case& c, Marks marks, const Scene& s, std::vector<std::vector<int64_t>>& paths) {
  const AttentionShape& shape = s.shape;
  std::memset(s.mask.data(), 0, static_cast<size_t>(s.mask.count()));
  std::vector<std::vector<int64_t>> nodes;
  for (int64_t j = 0; marks != Marks::kAny && j < shape.offset + shape.rows; j++) {
    // A chain, a star, or anything between them.
    const int64_t parent = marks == Marks::kCausal || c.random.one_in(3) ? j - 1 : c.random.range(-1, j - 1);
    nodes.push_back(parent < 0 ? std::vector<int64_t>() : nodes[static_cast<size_t>(parent)]);
    nodes.back().push_back(j);
  }
  const bool blank = c.random.one_in(4), wild = c.random.one_in(4);
  for (int64_t t = 0; t < shape.rows; t++) {
    if (marks == Marks::kAny) {
      const int64_t position = wild ? INT32_MAX : shape.slots + 3;
      s.position[t] = static_cast<int32_t>(c.random.one_in(2) ? c.random.range(-position, position) : -1);
      const int64_t density = c.random.range(1, 4);
      for (int64_t j = 0; j < std::min(shape.window, shape.slots - shape.length); j++)
        s.mask[t * shape.window + j] = !blank && c.random.one_in(density);
      continue;
    }
    // A causal chunk starts at the window's first slot, wherever it is written.
    const auto& path = nodes[static_cast<size_t>(marks == Marks::kCausal ? t : shape.offset + t)];
    const auto depth = static_cast<int64_t>(path.size()) - 1;
    s.position[t] = static_cast<int32_t>(shape.length + depth);
    for (int64_t d = 0; d <= depth; d++)
      s.mask[t * shape.window + path[static_cast<size_t>(d)]] = !shape.sliding || d > depth - shape.sliding;
    paths.push_back(path);
  }
}

void fuzz_attention(Case& c) {
  Random& random = c.random;
  const auto marks = static_cast<Marks>(random.range(0, 2));
  AttentionShape shape;
  shape.rows = random.size(40);
  shape.kv_heads = random.range(1, 3);
  shape.group = random.range(1, 4);
  shape.width = 2 * random.size(65);
  // Some windows lie across the end of a chunk of tokens.
  shape.length = random.one_in(8)   ? 0
                 : random.one_in(2) ? random.range(0, 400)
                                    : random.range(1, 3) * kChunk - random.range(0, 30);
  const int64_t most_offset = marks == Marks::kCausal ? random.one_in(4) : 20;
  shape.offset = random.one_in(2) ? 0 : random.range(0, most_offset);
  shape.window = marks == Marks::kAny && random.one_in(8) ? 0 : shape.offset + shape.rows + random.range(0, 5);
  shape.slots = shape.length + shape.offset + shape.rows + random.range(0, 6);
  shape.sliding = random.one_in(2) ? 0 : random.size(random.one_in(2) ? 40 : 300);
  Scene s{&kElements[random.range(0, 1)], shape, {}, {}, {}, marks == Marks::kCausal, {}, {}, {}, {}, {}};
  describe("tree_attention of %s, %s, rows %lld, K %lld, G %lld, H %lld, slots %lld, window %lld, length %lld, "
           "offset %lld, sliding %lld, threads %lld",
           s.element->name, marks == Marks::kCausal ? "causal" : marks == Marks::kTree ? "tree" : "any mask",
           static_cast<long long>(shape.rows), static_cast<long long>(shape.kv_heads),
           static_cast<long long>(shape.group), static_cast<long long>(shape.width),
           static_cast<long long>(shape.slots), static_cast<long long>(shape.window),
           static_cast<long long>(shape.length), static_cast<long long>(shape.offset),
           static_cast<long long>(shape.sliding), static_cast<long long>(c.threads));
  const float amplitudes[] = {0.1f, 1, 6};
  s.qkv = random_floats(random, shape.rows * s.row_size(), amplitudes[random.range(0, 2)]);
  s.cos = Buffer<float>(random, shape.rows * shape.width / 2);
  s.sin = Buffer<float>(random, shape.rows * shape.width / 2);
  for (int64_t i = 0; i < s.cos.count(); i++) {
    const double angle = 4 * random.number();
    s.cos[i] = static_cast<float>(std::cos(angle));
    s.sin[i] = static_cast<float>(std::sin(angle));
  }
  s.mask = Buffer<uint8_t>(random, shape.rows * shape.window);
  s.position = Buffer<int32_t>(random, shape.rows);
  std::vector<std::vector<int64_t>> paths;
  mark_window(c, marks, s, paths);
  const int64_t bytes = shape.kv_heads * shape.slots * s.slot_bytes();
  s.key = Buffer<uint8_t>(random, bytes, s.element->bytes);
  s.value = Buffer<uint8_t>(random, bytes, s.element->bytes);
  fill_cache(random, s);
  s.out = Buffer<float>(random, shape.rows * s.out_size());

  const Scene before = s.copy(random);
  if (const char* wrong = s.run(c.pool, c.threads)) fail("refused: %s", wrong);
  record(s.out);
  expect_cache(before, s);
  const int64_t queries = shape.rows * shape.kv_heads * shape.group;
  for (int64_t i = 0; i < std::min<int64_t>(queries, 8); i++) {
    const int64_t query = queries <= 8 ? i : random.range(0, queries - 1);
    expect_query(s, query / (shape.kv_heads * shape.group), query / shape.group % shape.kv_heads, query % shape.group);
  }

  const Scene single = before.copy(random);
  if (single.run(c.pool, 1)) fail("refused on one thread");
  s.expect_same_cache("the cache of one thread", single);
  expect_same_bits("one thread", single.out.data(), s.out.data(), s.out.count());

  const int64_t first = random.range(0, shape.rows - 1);
  const int64_t few = random.one_in(2) ? 1 : random.range(1, shape.rows - first);
  const Scene some = s.rows(random, first, few);
  if (some.run(c.pool, random.range(1, 3))) fail("rows by themselves are refused");
  s.expect_same_cache("the cache of rows by themselves", some);
  expect_same_bits("rows by themselves", some.out.data(), s.out.data() + first * s.out_size(), some.out.count());

  if (marks == Marks::kTree || (marks == Marks::kCausal && shape.offset == 0)) {
    const int64_t t = random.range(0, shape.rows - 1);
    expect_path_in_prefix(c, s, t, paths[static_cast<size_t>(t)], random.one_in(2));
  }
  if (random.one_in(3)) {
    const Scene written = before.copy(random);
    if (written.run(c.pool, c.threads, true)) fail("writing only is refused");
    s.expect_same_cache("the cache when only written", written);
  }
  if (random.one_in(3)) expect_contained(c, before, s);
  if (random.one_in(3)) expect_refusals(c, before);
}

#endif

// ---- All of it

void run_case(Case& c) {
  static const std::vector<void (*)(Case&)> operations = {
      fuzz_lanes,
      fuzz_parallel,
#if defined(FUZZ_PRODUCTS)
      fuzz_rms_norm,  fuzz_row_top,   fuzz_take_rows, fuzz_product, fuzz_product, fuzz_product, fuzz_product,
#endif
#if defined(FUZZ_PACKED)
      fuzz_packed,    fuzz_packed,    fuzz_packed,
#endif
#if defined(FUZZ_ATTENTION)
      fuzz_attention, fuzz_attention, fuzz_attention, fuzz_attention,
#endif
  };
  operations[static_cast<size_t>(c.random.range(0, static_cast<int64_t>(operations.size()) - 1))](c);
}

void run_cases(int64_t first, int64_t count) {
  Pool kept(3);
  for (case_number = first; case_number < first + count; case_number++) {
    Random random(static_cast<uint64_t>(case_number) * 0x2545F4914F6CDD1Du);
    const int64_t threads = random.range(1, 3);
    // Threads that are new have scratch buffers of exactly the size that they need; those that stay have old numbers in
    // theirs.
    const bool fresh = random.one_in(2), held = random.one_in(8);
    if (fresh) {
      Pool pool(random.one_in(4) ? 1 : 3);
      pool.hold(held);
      Case c{random, pool, threads};
      std::thread([&c] { run_case(c); }).join();
    } else {
      kept.hold(held);
      Case c{random, kept, threads};
      run_case(c);
      kept.hold(false);
    }
  }
}

}  // namespace
}  // namespace jaxspec

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fputs("usage: fuzz FIRST COUNT\n", stderr);
    return 2;
  }
  jaxspec::watch_for_death();
  jaxspec::run_cases(std::atoll(argv[1]), std::atoll(argv[2]));
  std::printf("%016llx\n", static_cast<unsigned long long>(jaxspec::digest));
  return 0;
}
