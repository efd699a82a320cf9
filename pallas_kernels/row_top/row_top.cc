#include "row_top.h"

#include <algorithm>
#include <limits>

#include "../native/lanes.h"

namespace jaxspec {

namespace {

struct SlicesTag;

constexpr int64_t kSlice = 16384;
constexpr float kLargest = std::numeric_limits<float>::max(), kNothing = -std::numeric_limits<float>::infinity();

struct Best {
  float value;
  int32_t column;
};

// The `most` largest numbers so far, the largest first, of equal ones the one that came first.
class BestList {
 public:
  BestList(Best* best, int64_t most, int64_t count = 0) : best_(best), most_(most), count_(count) {}

  // What a number must exceed to be one of them.
  float least() const { return count_ < most_ ? kNothing : best_[most_ - 1].value; }
  int64_t count() const { return count_; }

  void add(Best next) {
    int64_t place = count_ < most_ ? count_++ : most_ - 1;
    for (; place > 0 && best_[place - 1].value < next.value; place--) best_[place] = best_[place - 1];
    best_[place] = next;
  }

 private:
  Best* best_;
  int64_t most_, count_;
};

// What a slice of a row gives: its `most` best, how many there are, and the sum of e^(x - its largest).
struct Slice {
  int64_t count;
  float total;
};

// Sixteen numbers of which NaN is -infinity, and +infinity the largest number.
inline Lanes tidy(Lanes x) { return min(max(x, set(kNothing)), set(kLargest)); }

inline int64_t find_best(const float* x, int64_t from, int64_t to, int64_t most, Best* best) {
  constexpr int64_t kBlock = 4 * kLanes;
  BestList list(best, most);
  const auto look = [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
      const float value = x[i] < kLargest ? x[i] : (x[i] >= kLargest ? kLargest : kNothing);
      if (value > list.least()) list.add({value, static_cast<int32_t>(i)});
    }
  };
  int64_t i = from;
  for (; i + kBlock <= to; i += kBlock) {
    // A NaN in the first operand loses.
    Lanes most_of = max(load(x + i), set(kNothing));
    for (int64_t j = kLanes; j < kBlock; j += kLanes) most_of = max(load(x + i + j), most_of);
    float each[kLanes], largest = kNothing;
    store(each, most_of);
    for (int j = 0; j < kLanes; j++) largest = each[j] > largest ? each[j] : largest;
    if (largest > list.least()) look(i, i + kBlock);
  }
  look(i, to);
  return list.count();
}

inline float sum_exponentials(const float* x, int64_t from, int64_t to, float largest) {
  Lanes total = zero();
  int64_t i = from;
  for (; i + kLanes <= to; i += kLanes) total = total + exp(tidy(load(x + i)) - set(largest));
  if (const int tail = static_cast<int>(to - i))
    total = total + keep_first(exp(tidy(load(x + i, tail)) - set(largest)), tail, zero());
  return sum(total);
}

}  // namespace

void row_top(ThreadPool& pool, int64_t threads, const float* x, int64_t rows, int64_t columns, int64_t most, float* best,
             int32_t* column, float* total) {
  const int64_t slices = (columns + kSlice - 1) / kSlice;
  // Of each slice: a `Slice` and `most` of its numbers.
  const int64_t size = (sizeof(Slice) + most * sizeof(Best)) / sizeof(float);
  float* found = scratch<SlicesTag>(rows * slices * size);
  // Less than this is not worth a hand-over to other threads.
  constexpr int64_t kWorthwhile = 128 * 1024;
  parallel(pool, rows * columns < kWorthwhile ? 1 : threads, rows * slices, [=](int64_t unit) {
    const float* row = x + unit / slices * columns;
    const int64_t from = unit % slices * kSlice, to = std::min(from + kSlice, columns);
    Slice* slice = reinterpret_cast<Slice*>(found + unit * size);
    Best* own = reinterpret_cast<Best*>(slice + 1);
    slice->count = find_best(row, from, to, most, own);
    slice->total = total && slice->count ? sum_exponentials(row, from, to, own[0].value) : 0.0f;
  });
  for (int64_t r = 0; r < rows; r++) {
    const auto slice_at = [=](int64_t i) { return reinterpret_cast<Slice*>(found + (r * slices + i) * size); };
    // The first slice's list grows to be the row's.
    float sum = 0, largest = kNothing;
    for (int64_t i = 0; total && i < slices; i++)
      if (slice_at(i)->count) largest = std::max(largest, reinterpret_cast<Best*>(slice_at(i) + 1)->value);
    for (int64_t i = 0; total && i < slices; i++) {
      if (!slice_at(i)->count) continue;
      float factor[1];
      store(factor, exp(set(reinterpret_cast<Best*>(slice_at(i) + 1)->value - largest)), 1);
      sum += slice_at(i)->total * factor[0];
    }
    if (total) total[r] = std::max(largest, -kLargest) + std::log(std::max(sum, 1.0f));
    Best* all = reinterpret_cast<Best*>(slice_at(0) + 1);
    BestList list(all, most, slice_at(0)->count);
    for (int64_t i = 1; i < slices; i++) {
      const Best* next = reinterpret_cast<Best*>(slice_at(i) + 1);
      for (int64_t j = 0; j < slice_at(i)->count && next[j].value > list.least(); j++) list.add(next[j]);
    }
    for (int64_t i = 0; i < list.count(); i++) {
      best[r * most + i] = all[i].value + 0.0f;
      column[r * most + i] = all[i].column;
    }
    int64_t filled = list.count();
    for (int64_t c = 0; filled < most; c++) {
      if (x[r * columns + c] > kNothing) continue;
      best[r * most + filled] = kNothing;
      column[r * most + filled++] = static_cast<int32_t>(c);
    }
  }
}

}  // namespace jaxspec
