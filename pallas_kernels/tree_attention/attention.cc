// The file exceeds 400 lines because the steps of one operation are read together.
#include "attention.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "../linear/formats.h"
#include "../native/prefetch.h"

namespace jaxspec {

namespace {

constexpr int kChunk = 128;
// Most numbers that a thread keeps of parts that wait to be merged: 8 MB.
constexpr int64_t kMostParts = int64_t{1} << 21;
// Fewer are merged by one thread.
constexpr int64_t kFewParts = 16 * 1024;
// Sums of sixteen lanes that the registers hold beside what is added to them: AVX-512 has 32 registers of sixteen, AVX2
// 16 of eight.
#if defined(__AVX512F__)
constexpr int kSums = 16;
#else
constexpr int kSums = 4;
#endif
// Of four things, how many are added to for so many queries at once.
constexpr int at_once(int queries) { return kSums >= 4 * queries ? 4 : kSums >= 2 * queries ? 2 : 1; }
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct RowsScratch;
struct PartScratch;
struct LocalScratch;

template <class Element>
inline Lanes load_step(const uint8_t* p, int64_t step) {
  Lanes w[1];
  Element::unpack(p, step, w);
  return w[0];
}

inline void store_element(Float32, uint8_t* p, int64_t i, float x) { std::memcpy(p + 4 * i, &x, 4); }
inline void store_element(BFloat16, uint8_t* p, int64_t i, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  // To nearest, ties to even; a NaN stays one.
  uint32_t rounded = x == x ? bits + 0x7FFF + (bits >> 16 & 1) : bits | 0x400000;
  uint16_t half = static_cast<uint16_t>(rounded >> 16);
  std::memcpy(p + 2 * i, &half, 2);
}

inline void store_element(Float16, uint8_t* p, int64_t i, float x) { store_half(p + 2 * i, x); }

// Whether a number is finite once it is stored.
inline bool stays_finite(Float32, float x) { return std::isfinite(x); }
// From the middle between the largest bfloat16 and what would come next, numbers are rounded to infinity.
inline bool stays_finite(BFloat16, float x) { return std::abs(x) < 0x1.FFp127f; }
inline bool stays_finite(Float16, float x) { return std::abs(x) < 65520.0f; }

// Softmax parts of one query: largest score, sum of weights, weighted values; the values follow it in memory.
struct Part {
  float largest, total;
};

// Which tokens each row sees.
class Visible {
 public:
  Visible(const AttentionShape& s, const uint8_t* mask, const int32_t* position)
      : shape_(s), causal_(!mask), rows_(s.rows) {
    for (int64_t t = 0; t < s.rows; t++) {
      Row& row = rows_[t];
      row.begin = static_cast<int64_t>(slots_.size());
      if (mask) {
        for (int64_t j = 0; j < s.window; j++)
          if (mask[t * s.window + j]) slots_.push_back(static_cast<int32_t>(j));
      } else {
        // A causal chunk: row t sees the t rows before it and itself.
        const int64_t seen = t + 1, hidden = s.sliding ? std::max<int64_t>(0, seen - s.sliding) : 0;
        for (int64_t j = hidden; j < seen; j++) slots_.push_back(static_cast<int32_t>(j));
      }
      const int64_t marked = static_cast<int64_t>(slots_.size()) - row.begin;
      const int64_t last = mask ? position[t] : s.length + t;
      row.first = s.sliding ? std::min(s.length, std::max<int64_t>(0, last - s.sliding + 1)) : 0;
      // Window slots can only be cut once the whole prefix is. A row that does not matter may have any position.
      const int64_t own = std::min(last, s.slots - 1);
      row.window = row.first < s.length ? s.length : std::max(s.length, own + 1 - marked);
      if (row.first == s.length) row.first = row.window;
      row.end = row.window + marked;
    }
  }

  int64_t chunks(int64_t t) const { return (rows_[t].end + kChunk - 1) / kChunk; }

  // Tokens of a chunk that the row sees, as places within the chunk.
  int begin(int64_t t, int64_t chunk) const { return cut(rows_[t].first - chunk * kChunk); }
  int end(int64_t t, int64_t chunk) const { return cut(rows_[t].end - chunk * kChunk); }

  // Whether the row sees all of the chunk, in the slots of the same numbers: in the prefix, or in a causal chunk.
  bool in_order(int64_t t, int64_t chunk) const {
    return rows_[t].first <= chunk * kChunk && (chunk + 1) * kChunk <= (causal_ ? rows_[t].end : shape_.length);
  }

  int64_t slot(int64_t t, int64_t token) const {
    const Row& row = rows_[t];
    return token < row.window ? token : shape_.length + slots_[row.begin + token - row.window];
  }

  // The largest slot that any row sees.
  int64_t last_slot() const {
    int64_t last = shape_.length - 1;
    for (int32_t j : slots_) last = std::max(last, shape_.length + j);
    return last;
  }

 private:
  struct Row {
    int64_t begin;   // of its window slots in `slots_`
    int64_t first;   // token that it sees
    int64_t window;  // number of its first token in the window
    int64_t end;
  };

  static int cut(int64_t place) { return static_cast<int>(std::clamp<int64_t>(place, 0, kChunk)); }

  AttentionShape shape_;
  bool causal_;
  std::vector<Row> rows_;
  std::vector<int32_t> slots_;
};

// out[q][h] = sum over tokens of weight[q][token] * value[token][h], tokens in ascending order, for `kVectors` times 16 h
// from `step` on; for fewer, `count` says how many.
template <class Element, int kQueries, int kVectors>
inline void add_values(const float* weight, const uint8_t* const* value, int begin, int end, int64_t step, int count,
                       float* out, int64_t out_stride) {
  Lanes acc[kQueries][kVectors];
  for (int q = 0; q < kQueries; q++)
    for (int v = 0; v < kVectors; v++) acc[q][v] = zero();
  for (int i = begin; i < end; i++) {
    Lanes row[kVectors];
    if (count < kLanes) {
      row[0] = Element::unpack_tail(value[i], step, count);
    } else {
      for (int v = 0; v < kVectors; v++) row[v] = load_step<Element>(value[i], step + v);
    }
    for (int q = 0; q < kQueries; q++) {
      Lanes w = set(weight[q * kChunk + i]);
      for (int v = 0; v < kVectors; v++) acc[q][v] = fma(w, row[v], acc[q][v]);
    }
  }
  for (int q = 0; q < kQueries; q++)
    for (int v = 0; v < kVectors; v++)
      store(out + q * out_stride + (step + v) * kLanes, acc[q][v], v + 1 == kVectors ? count : kLanes);
}

template <class Element, int kQueries = 4>
void add_values_of(int64_t queries, const float* weight, const uint8_t* const* value, int begin, int end, int64_t width,
                   float* out, int64_t out_stride) {
  if (queries < kQueries) {
    if constexpr (kQueries > 1)
      add_values_of<Element, kQueries - 1>(queries, weight, value, begin, end, width, out, out_stride);
    return;
  }
  constexpr int kVectors = at_once(kQueries);
  int64_t h = 0;
  for (; h + kVectors * kLanes <= width; h += kVectors * kLanes)
    add_values<Element, kQueries, kVectors>(weight, value, begin, end, h / kLanes, kLanes, out, out_stride);
  for (; h < width; h += kLanes)
    add_values<Element, kQueries, 1>(weight, value, begin, end, h / kLanes,
                                     static_cast<int>(std::min<int64_t>(kLanes, width - h)), out, out_stride);
}

// Products of `kQueries` queries with four keys: score[q * kChunk + j].
template <class Element, int kQueries>
inline void score_four(const float* query, const uint8_t* const* keys, int64_t width, Lanes scale, float* score) {
  constexpr int kKeys = 4;
  static_assert(kQueries * kKeys <= kLanes, "`sums` adds up sixteen accumulators");
  constexpr int kAtOnce = at_once(kQueries);
  const int64_t steps = width / kLanes;
  const int tail = static_cast<int>(width % kLanes);
  Lanes all[kLanes];
#pragma GCC unroll 16
  for (int i = kQueries * kKeys; i < kLanes; i++) all[i] = zero();
#pragma GCC unroll 4
  for (int first = 0; first < kKeys; first += kAtOnce) {
    Lanes acc[kQueries][kAtOnce];
    for (int q = 0; q < kQueries; q++)
      for (int j = 0; j < kAtOnce; j++) acc[q][j] = zero();
    const uint8_t* key[kAtOnce];
    for (int j = 0; j < kAtOnce; j++) key[j] = keys[first + j];
    for (int64_t step = 0; step < steps; step++) {
      Lanes row[kAtOnce];
      for (int j = 0; j < kAtOnce; j++) row[j] = load_step<Element>(key[j], step);
      for (int q = 0; q < kQueries; q++) {
        Lanes a = load(query + q * width + step * kLanes);
        if constexpr (kAtOnce > 1) hold(a);
        for (int j = 0; j < kAtOnce; j++) acc[q][j] = fma(a, row[j], acc[q][j]);
      }
    }
    if (tail) {
      for (int q = 0; q < kQueries; q++) {
        Lanes a = load(query + q * width + steps * kLanes, tail);
        for (int j = 0; j < kAtOnce; j++) acc[q][j] = fma(a, Element::unpack_tail(key[j], steps, tail), acc[q][j]);
      }
    }
    for (int q = 0; q < kQueries; q++)
      for (int j = 0; j < kAtOnce; j++) all[q * kKeys + first + j] = acc[q][j];
  }
  float together[kLanes];
  store(together, sums(all) * scale);
  for (int q = 0; q < kQueries; q++) std::memcpy(score + q * kChunk, together + q * kKeys, kKeys * sizeof(float));
}

template <class Element, int kQueries = 4>
void score_four_of(int64_t queries, const float* query, const uint8_t* const* keys, int64_t width, Lanes scale,
                   float* score) {
  if (queries == kQueries) {
    score_four<Element, kQueries>(query, keys, width, scale, score);
  } else if constexpr (kQueries > 1) {
    score_four_of<Element, kQueries - 1>(queries, query, keys, width, scale, score);
  }
}

// c tanh(s / c), by e^(2s / c), which `exp` keeps finite.
inline Lanes bound(Lanes s, float softcap) {
  const Lanes e = exp(s * set(2.0f / softcap)), one = set(1.0f);
  return (e - one) / (e + one) * set(softcap);
}

// Weights of the tokens `[begin, end)` of a chunk from their scores, in place: e^(score - largest), and zero for the
// places beside them up to whole lanes, which change no sum.
inline Part weigh(float* score, int begin, int end, float softcap) {
  const int first = begin / kLanes * kLanes;
  if (softcap > 0)
    for (int i = first; i < end; i += kLanes) store(score + i, bound(load(score + i), softcap));
  for (int i = first; i < begin; i++) score[i] = -kInfinity;
  for (int i = end; i % kLanes; i++) score[i] = -kInfinity;
  Lanes most = set(-kInfinity);
  for (int i = first; i < end; i += kLanes) most = max(load(score + i), most);
  float each[kLanes];
  store(each, most);
  float largest = -kInfinity;
  for (int i = 0; i < kLanes; i++) largest = each[i] > largest ? each[i] : largest;
  Lanes total = zero();
  for (int i = first; i < end; i += kLanes) {
    Lanes e = exp(load(score + i) - set(largest));
    if (i + kLanes > end) e = keep_first(e, end - i, zero());
    if (i < begin) e = e - keep_first(e, begin - i, zero());
    store(score + i, e);
    total = total + e;
  }
  return {largest, sum(total)};
}

// Attention of `queries` queries, which see the same tokens `[begin, end)` of a chunk, to them.
template <class Element>
void attend(const float* query, int64_t queries, const uint8_t* const* key, const uint8_t* const* value, int begin,
            int end, int64_t width, float softcap, float* weight, float* part, int64_t part_stride) {
  constexpr int64_t kTogether = 4;
  const Lanes scale = set(1.0f / std::sqrt(static_cast<float>(width)));
  for (int i = begin / 4 * 4; i < end; i += 4) {
    // Places that no row sees are scored as their neighbours, and weigh nothing below.
    const uint8_t* keys[4];
    for (int j = 0; j < 4; j++) {
      const int place = std::clamp(i + j, begin, end - 1);
      keys[j] = key[place];
      // The values come next, and after them the keys of the next chunk (`add_values`).
      prefetch_bytes(value[place], width * Element::kBytes);
    }
    for (int64_t q = 0; q < queries; q += kTogether)
      score_four_of<Element>(std::min(kTogether, queries - q), query + q * width, keys, width, scale,
                             weight + q * kChunk + i);
  }
  for (int64_t q = 0; q < queries; q++) {
    const Part head = weigh(weight + q * kChunk, begin, end, softcap);
    std::memcpy(part + q * part_stride, &head, sizeof head);
  }
  for (int i = begin; i < end; i++) prefetch_bytes(key[i] + kChunk * width * Element::kBytes, width * Element::kBytes);
  for (int64_t q = 0; q < queries; q += kTogether)
    add_values_of<Element>(std::min(kTogether, queries - q), weight + q * kChunk, value, begin, end, width,
                           part + q * part_stride + 2, part_stride);
}

// Merge the next chunk of one query into what came before; both are a `Part` and `width` values.
inline void merge(float* into, const float* next, int64_t width) {
  Part a, b;
  std::memcpy(&a, into, sizeof a);
  std::memcpy(&b, next, sizeof b);
  if (b.total == 0) return;  // the row sees nothing of that chunk
  if (a.total == 0) {
    std::memcpy(into, next, (width + 2) * sizeof(float));
    return;
  }
  // The first operand of a comparison with NaN loses; NaN weights bring it back.
  const float largest = a.largest > b.largest ? a.largest : b.largest;
  const float less[2] = {a.largest - largest, b.largest - largest};
  float factors[2];
  store(factors, exp(load(less, 2)), 2);
  const Part sum{largest, a.total * factors[0] + b.total * factors[1]};
  std::memcpy(into, &sum, sizeof sum);
  for (int64_t h = 0; h < width; h++) into[2 + h] = into[2 + h] * factors[0] + next[2 + h] * factors[1];
}

template <class Element>
const char* attend_all(ThreadPool& pool, int64_t threads, const AttentionShape& s, const float* qkv, const float* cos,
                           const float* sin, const uint8_t* mask, const int32_t* position, uint8_t* key, uint8_t* value,
                           float* out) {
  if (s.length < 0 || s.offset < 0 || s.length + s.offset + s.rows > s.slots)
    return "tree_attention: the rows do not fit into the cache";
  const Visible visible(s, mask, position);
  if (visible.last_slot() >= s.slots) return "tree_attention: the mask marks slots behind the end of the cache";

  const int64_t H = s.width, half = H / 2, G = s.group;
  float* queries = scratch<RowsScratch>(s.rows * s.kv_heads * G * H);  // [K, rows, G, H]
  for (int64_t t = 0; t < s.rows; t++) {
    const float *c = cos + t * half, *n = sin + t * half;
    for (int64_t k = 0; k < s.kv_heads; k++) {
      const float* head = qkv + (t * s.kv_heads + k) * (G + 2) * H;
      float* rotated = queries + (k * s.rows + t) * G * H;
      for (int64_t i = 0; i < G * H; i += H) {
        for (int64_t h = 0; h < half; h++) {
          rotated[i + h] = head[i + h] * c[h] - head[i + half + h] * n[h];
          rotated[i + half + h] = head[i + half + h] * c[h] + head[i + h] * n[h];
        }
      }
      const int64_t place = (k * s.slots + s.length + s.offset + t) * H;
      const float *new_key = head + G * H, *new_value = new_key + H;
      for (int64_t h = 0; h < half; h++) {
        store_element(Element(), key, place + h, new_key[h] * c[h] - new_key[half + h] * n[h]);
        store_element(Element(), key, place + half + h, new_key[half + h] * c[h] + new_key[h] * n[h]);
      }
      // One broken row must not reach others through reused buffers.
      for (int64_t h = 0; h < H; h++)
        store_element(Element(), value, place + h, stays_finite(Element(), new_value[h]) ? new_value[h] : 0.0f);
    }
  }
  if (!out) return nullptr;

  constexpr int64_t kRows = 8;
  const int64_t tiles = (s.rows + kRows - 1) / kRows, part_size = 2 + H;
  int64_t chunks = 1;  // of which none is seen where no row sees anything
  for (int64_t t = 0; t < s.rows; t++) chunks = std::max(chunks, visible.chunks(t));

  // Attention of a tile's rows to one chunk: `part_size` numbers for each of its queries.
  auto attend_chunk = [&, key, value](int64_t tile, int64_t k, int64_t chunk, float* part) {
    const int64_t first = tile * kRows, rows = std::min(kRows, s.rows - first);
    float* weight = scratch<LocalScratch>(kRows * G * kChunk);
    const uint8_t *keys[kChunk], *values[kChunk];
    const uint8_t *key_head = key + k * s.slots * H * Element::kBytes, *value_head = value + k * s.slots * H * Element::kBytes;
    auto attend_rows = [&](int64_t t, int64_t count) {
      const int begin = visible.begin(t, chunk), end = visible.end(t, chunk);
      float* own = part + (t - first) * G * part_size;
      if (begin >= end) {
        for (int64_t q = 0; q < count * G; q++) own[q * part_size] = own[q * part_size + 1] = 0;
        return;
      }
      for (int i = begin; i < end; i++) {
        const int64_t at = visible.slot(t, chunk * kChunk + i) * H * Element::kBytes;
        keys[i] = key_head + at;
        values[i] = value_head + at;
      }
      attend<Element>(queries + (k * s.rows + t) * G * H, count * G, keys, values, begin, end, H, s.softcap, weight,
                      own, part_size);
    };
    bool together = true;
    for (int64_t t = first; t < first + rows; t++) together = together && visible.in_order(t, chunk);
    if (together) return attend_rows(first, rows);
    for (int64_t t = first; t < first + rows; t++) attend_rows(t, 1);
  };
  auto finish = [&](int64_t tile, int64_t k, const float* state) {
    const int64_t first = tile * kRows, rows = std::min(kRows, s.rows - first);
    for (int64_t q = 0; q < rows * G; q++) {
      const int64_t t = first + q / G;
      float* row = out + ((t * s.kv_heads + k) * G + q % G) * H;
      const float* values = state + q * part_size + 2;
      float total = state[q * part_size + 1], factor = 1.0f;
      if (s.sinks && total != 0) {
        const float largest = state[q * part_size], sink = s.sinks[k * G + q % G], most = sink > largest ? sink : largest;
        const float less[2] = {largest - most, sink - most};
        float factors[2];
        store(factors, exp(load(less, 2)), 2);
        factor = factors[0];
        total = total * factor + factors[1];
      }
      for (int64_t h = 0; h < H; h++) row[h] = total == 0 ? 0.0f : values[h] * factor / total;
    }
  };

  // A few rows: the chunks are shared out among threads; many, or more chunks than memory should hold the parts of: the
  // rows are, and a chunk is merged as it comes. Either way a row's chunks are merged from the first to the last.
  const int64_t heads = tiles * s.kv_heads, tile_size = std::min(kRows, s.rows) * G * part_size;
  auto merge_tile = [&](int64_t unit, auto chunk_part) {
    const int64_t tile = unit / s.kv_heads, k = unit % s.kv_heads, count = std::min(kRows, s.rows - tile * kRows) * G;
    float* state = chunk_part(0);
    for (int64_t chunk = 1; chunk < chunks; chunk++) {
      const float* next = chunk_part(chunk);
      for (int64_t q = 0; q < count; q++) merge(state + q * part_size, next + q * part_size, H);
    }
    finish(tile, k, state);
  };
  const int64_t all_parts = heads * chunks * tile_size;
  if (heads < 4 * threads && all_parts <= kMostParts) {
    float* parts = scratch<PartScratch>(all_parts);
    // A thread takes a few chunks that follow each other, so that what it fetches ahead is its own.
    const int64_t run = std::clamp<int64_t>(heads * chunks / (4 * threads), 1, 8), runs = (chunks + run - 1) / run;
    parallel(pool, threads, heads * runs, [&, parts](int64_t i) {
      const int64_t unit = i / runs, first = i % runs * run;
      for (int64_t chunk = first; chunk < std::min(first + run, chunks); chunk++)
        attend_chunk(unit / s.kv_heads, unit % s.kv_heads, chunk, parts + (unit * chunks + chunk) * tile_size);
    });
    parallel(pool, all_parts < kFewParts ? 1 : threads, heads, [&, parts](int64_t unit) {
      merge_tile(unit, [&](int64_t chunk) { return parts + (unit * chunks + chunk) * tile_size; });
    });
  } else {
    parallel(pool, threads, heads, [&](int64_t unit) {
      float* parts = scratch<PartScratch>(2 * tile_size);
      merge_tile(unit, [&](int64_t chunk) {
        float* part = parts + (chunk ? tile_size : 0);
        attend_chunk(unit / s.kv_heads, unit % s.kv_heads, chunk, part);
        return part;
      });
    });
  }
  return nullptr;
}

}  // namespace

const char* tree_attention(CacheType type, ThreadPool& pool, int64_t threads, const AttentionShape& s, const float* qkv,
                           const float* cos, const float* sin, const uint8_t* mask, const int32_t* position,
                           uint8_t* key, uint8_t* value, float* out) {
  const auto run = type == CacheType::kFloat32    ? attend_all<Float32>
                   : type == CacheType::kBFloat16 ? attend_all<BFloat16>
                                                  : attend_all<Float16>;
  return run(pool, threads, s, qkv, cos, sin, mask, position, key, value, out);
}

}  // namespace jaxspec
