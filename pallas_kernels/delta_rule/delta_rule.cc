#include "delta_rule.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "../native/lanes.h"

namespace jaxspec {
namespace {

struct ListTag;
struct StateTag;
struct WeightTag;

// Fewer products than this are not worth a hand-over to other threads.
constexpr int64_t kWorthwhile = 64 * 1024;

inline Lanes take(const float* p, int64_t n) { return n >= kLanes ? load(p) : load(p, static_cast<int>(n)); }
inline void put(float* p, Lanes a, int64_t n) { n >= kLanes ? store(p, a) : store(p, a, static_cast<int>(n)); }

// Calls `work(first, count of lanes)` for pieces of `width` columns of up to `kMost` lanes; the last may be cut.
template <int kMost, class Work>
inline void for_columns(int64_t width, const Work& work) {
  int64_t c = 0;
  for (; c + kMost * kLanes <= width; c += kMost * kLanes) work(c, std::integral_constant<int, kMost>());
  for (; c < width; c += kLanes) work(c, std::integral_constant<int, 1>());
}

// y[m] = x[m] S for `kRows` vectors of `inputs` numbers, added up in their order; S has `width` columns.
template <int kRows>
void multiply(const float* state, int64_t stride, int64_t inputs, int64_t width, const float* const* x,
              float* const* y) {
  for_columns<8 / kRows>(width, [&](int64_t c, auto lanes) {
    constexpr int kCount = decltype(lanes)::value;
    Lanes sums[kRows][kCount];
    for (auto& row : sums)
      for (Lanes& each : row) each = zero();
    for (int64_t k = 0; k < inputs; k++) {
      const float* from = state + k * stride + c;
      for (int i = 0; i < kCount; i++) {
        const Lanes column = take(from + i * kLanes, width - c - i * kLanes);
        for (int m = 0; m < kRows; m++) sums[m][i] = fma(set(x[m][k]), column, sums[m][i]);
      }
    }
    for (int m = 0; m < kRows; m++)
      for (int i = 0; i < kCount; i++) put(y[m] + c + i * kLanes, sums[m][i], width - c - i * kLanes);
  });
}

// The ancestors of a row, in ascending order of their slots, itself last.
struct Ancestors {
  int32_t* slot;
  float* decay;
  float* product;  // of each one's key with the row's key, then with its query
  int64_t count;
};

// The products of eight keys at a time with a key and a query, in sixteen lanes over their entries.
void multiply_keys(const float* keys, int64_t width, const float* key, const float* query, const Ancestors& of) {
  for (int64_t first = 0; first < of.count; first += kLanes / 2) {
    const float* row[kLanes / 2];
    for (int64_t i = 0; i < kLanes / 2; i++) row[i] = keys + of.slot[std::min(first + i, of.count - 1)] * width;
    Lanes all[kLanes];
    for (Lanes& each : all) each = zero();
    for (int64_t c = 0; c < width; c += kLanes) {
      const Lanes k = take(key + c, width - c), q = take(query + c, width - c);
      for (int i = 0; i < kLanes / 2; i++) {
        const Lanes other = take(row[i] + c, width - c);
        all[2 * i] = fma(other, k, all[2 * i]);
        all[2 * i + 1] = fma(other, q, all[2 * i + 1]);
      }
    }
    store(of.product + 2 * first, sums(all));
  }
}

// `count` rows of one value head folded into `width` columns of its state.
void fold(const KeptRows& kept, const DeltaShape& s, int64_t head, int64_t member, int64_t count, float* state,
          int64_t stride) {
  const float* keys = kept.key + head * s.kept * s.key_width;
  const float* values = kept.value + head * s.kept * s.group * s.value_width + member * s.value_width;
  const float* decays = kept.decay + head * s.kept * s.group + member;
  for (int64_t k = 0; k < s.key_width; k++) {
    for_columns<4>(s.value_width, [&](int64_t c, auto lanes) {
      constexpr int kCount = decltype(lanes)::value;
      float* at = state + k * stride + c;
      Lanes sum[kCount];
      for (int i = 0; i < kCount; i++) sum[i] = take(at + i * kLanes, s.value_width - c - i * kLanes);
      for (int64_t r = 0; r < count; r++) {
        const Lanes decay = set(decays[r * s.group]), key = set(keys[r * s.key_width + k]);
        const float* value = values + r * s.group * s.value_width + c;
        for (int i = 0; i < kCount; i++)
          sum[i] = fma(decay, sum[i], take(value + i * kLanes, s.value_width - c - i * kLanes) * key);
      }
      for (int i = 0; i < kCount; i++) put(at + i * kLanes, sum[i], s.value_width - c - i * kLanes);
    });
  }
}

// The columns of a row in one value head, after the products with the state: its corrected value and its result.
void walk(const Ancestors& of, const float* values, int64_t stride, int64_t width, const float* value, float rate,
          const float* key_part, float* corrected, float* out) {
  const int64_t last = of.count - 1;
  for_columns<4>(width, [&](int64_t c, auto lanes) {
    constexpr int kCount = decltype(lanes)::value;
    const auto left = [&](int i) { return width - c - i * kLanes; };
    Lanes y[kCount], z[kCount];
    for (int i = 0; i < kCount; i++) {
      y[i] = take(key_part + c + i * kLanes, left(i));
      z[i] = take(out + c + i * kLanes, left(i));
    }
    for (int64_t e = 0; e < last; e++) {
      const Lanes decay = set(of.decay[e]), k = set(of.product[2 * e]), q = set(of.product[2 * e + 1]);
      const float* from = values + of.slot[e] * stride + c;
      for (int i = 0; i < kCount; i++) {
        const Lanes u = take(from + i * kLanes, left(i));
        y[i] = fma(decay, y[i], k * u);
        z[i] = fma(decay, z[i], q * u);
      }
    }
    const Lanes decay = set(of.decay[last]), q = set(of.product[2 * last + 1]);
    for (int i = 0; i < kCount; i++) {
      const Lanes u = set(rate) * (take(value + c + i * kLanes, left(i)) - decay * y[i]);
      put(corrected + c + i * kLanes, u, left(i));
      put(out + c + i * kLanes, fma(decay, z[i], q * u), left(i));
    }
  });
}

}  // namespace

const char* delta_rule(ThreadPool& pool, int64_t threads, const DeltaShape& s, const float* query, const float* key,
                       const float* value, const float* decay, const float* rate, const uint8_t* mask,
                       const uint8_t* late, const float* state, const KeptRows& kept, float* out) {
  const int64_t T = s.rows, K = s.key_width, V = s.value_width, g = s.group, R = s.kept;
  if (s.first < 0 || s.place < s.first || s.place + T > R) return "delta_rule: the rows do not lie among the kept ones";
  for (int64_t t = 0; t < T; t++) {
    for (int64_t h = 0; h < s.heads; h++) {
      std::memcpy(kept.key + (h * R + s.place + t) * K, key + (t * s.heads + h) * K, K * sizeof(float));
      std::memcpy(kept.decay + (h * R + s.place + t) * g, decay + (t * s.heads + h) * g, g * sizeof(float));
    }
  }
  // Rows that pad a pass may say anything; what is not written is not read.
  const int64_t folded = std::min(s.block, s.first);
  const bool some_late = std::any_of(late, late + T, [](uint8_t each) { return each != 0; });
  const int64_t worth = T * K * V * s.heads * g < kWorthwhile ? 1 : threads;
  parallel(pool, worth, s.heads * g, [&](int64_t unit) {
    const int64_t h = unit / g, j = unit % g;
    const int64_t room = R + kLanes, padded = (V + kLanes - 1) / kLanes * kLanes;
    float* lists = scratch<ListTag>(4 * room + T * padded);
    float* key_parts = lists + 4 * room;
    const auto row_of = [&](int64_t t) { return (t * s.heads + h) * g + j; };
    const auto multiply_rows = [&](const float* from, int64_t stride, bool are_late) {
      const float* x[8];
      float* y[8];
      int count = 0;
      for (int64_t t = 0; t < T; t++) {
        if ((late[t] != 0) == are_late) {
          x[count] = key + (t * s.heads + h) * K, x[count + 1] = query + (t * s.heads + h) * K;
          y[count] = key_parts + t * padded, y[count + 1] = out + row_of(t) * V;
          count += 2;
        }
        if (count == 8) multiply<8>(from, stride, K, V, x, y), count = 0;
      }
      const int done = count & 4;
      if (done) multiply<4>(from, stride, K, V, x, y);
      if (count & 2) multiply<2>(from, stride, K, V, x + done, y + done);
    };
    const float* own = state + h * K * g * V + j * V;
    multiply_rows(own, g * V, false);
    if (some_late) {
      float* next = scratch<StateTag>(K * V);
      for (int64_t k = 0; k < K; k++) std::memcpy(next + k * V, own + k * g * V, V * sizeof(float));
      fold(kept, s, h, j, folded, next, V);
      multiply_rows(next, V, true);
    }
    float* values = kept.value + h * R * g * V + j * V;
    for (int64_t t = 0; t < T; t++) {
      Ancestors of{reinterpret_cast<int32_t*>(lists), lists + room, lists + 2 * room, 0};
      const auto see = [&](int64_t slot) {
        of.slot[of.count] = static_cast<int32_t>(slot);
        of.decay[of.count++] = kept.decay[(h * R + slot) * g + j];
      };
      for (int64_t slot = late[t] ? folded : 0; slot < s.first; slot++) see(slot);
      for (int64_t w = 0; w < s.window && s.first + w < s.place + t; w++)
        if (mask[t * s.window + w]) see(s.first + w);
      see(s.place + t);
      multiply_keys(kept.key + h * R * K, K, key + (t * s.heads + h) * K, query + (t * s.heads + h) * K, of);
      walk(of, values, g * V, V, value + row_of(t) * V, rate[row_of(t)], key_parts + t * padded,
           values + (s.place + t) * g * V, out + row_of(t) * V);
    }
  });
  return nullptr;
}

void delta_fold(ThreadPool& pool, int64_t threads, const DeltaShape& s, const KeptRows& kept, float* state) {
  const int64_t width = s.group * s.value_width;
  parallel(pool, threads, s.heads * s.group, [&](int64_t unit) {
    const int64_t h = unit / s.group, j = unit % s.group;
    fold(kept, s, h, j, s.block, state + h * s.key_width * width + j * s.value_width, width);
  });
}

void short_conv(ThreadPool& pool, int64_t threads, const ConvShape& s, const float* weight, const float* kept,
                const float* x, const int32_t* before, int64_t stride, float* out) {
  const int64_t n = s.width, steps = s.taps - 1;
  const int64_t worth = s.rows * s.heads * n * s.taps < kWorthwhile ? 1 : threads;
  parallel(pool, worth, s.heads, [&](int64_t h) {
    float* columns = scratch<WeightTag>(s.taps * n);
    for (int64_t c = 0; c < n; c++)
      for (int64_t tap = 0; tap < s.taps; tap++) columns[tap * n + c] = weight[(h * n + c) * s.taps + tap];
    for (int64_t t = 0; t < s.rows; t++) {
      const auto own = [&](int64_t row) { return x + (row * s.heads + h) * n; };
      const auto row_at = [&](int32_t at) { return at < s.place ? kept + (h * s.kept + at) * n : own(at - s.place); };
      for_columns<4>(n, [&](int64_t c, auto lanes) {
        constexpr int kCount = decltype(lanes)::value;
        const auto left = [&](int i) { return n - c - i * kLanes; };
        Lanes sum[kCount];
        for (Lanes& each : sum) each = zero();
        for (int64_t tap = 0; tap <= steps; tap++) {
          const int32_t at = tap < steps ? before[tap * stride + t] : static_cast<int32_t>(s.place + t);
          if (at < 0) continue;
          const float* from = row_at(at) + c;
          for (int i = 0; i < kCount; i++)
            sum[i] = fma(take(from + i * kLanes, left(i)), take(columns + tap * n + c + i * kLanes, left(i)), sum[i]);
        }
        for (int i = 0; i < kCount; i++) {
          const Lanes gated = s.silu ? sum[i] / (set(1.0f) + exp(zero() - sum[i])) : sum[i];
          put(out + (t * s.heads + h) * n + c + i * kLanes, gated, left(i));
        }
      });
    }
  });
}

}  // namespace jaxspec
