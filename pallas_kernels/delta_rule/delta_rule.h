// The gated delta rule over the kept rows of a layer, the fold of its state, and the short convolution before it.
//
// A row is computed by itself: its sums run over the keys' entries and over its ancestors' slots in ascending order.
// So its bits do not depend on the rows beside it, on threads, or on the pass in which an ancestor ran.
#pragma once

#include "../native/parallel.h"

namespace jaxspec {

struct DeltaShape {
  int64_t rows;         // that are computed; the buffers may hold more
  int64_t heads;        // Hk, key heads
  int64_t group;        // g, value heads of each
  int64_t key_width;    // K
  int64_t value_width;  // V
  int64_t kept;         // R
  int64_t window;       // W, columns of the mask
  int64_t first;        // committed rows among the kept ones
  int64_t place;        // of the first row of the pass
  int64_t block;        // rows that late rows find in their state
};

// Rows of a layer that are kept: [Hk, R, K], [Hk, R, g V] and [Hk, R, g]; the state before them is [Hk, K, g V].
struct KeptRows {
  float *key, *value, *decay;
};

// Write keys, decays and corrected values of the rows among the kept ones, and their results.
//
//   query, key   [rows, Hk, K]
//   value, out   [rows, Hk, g, V]
//   decay, rate  [rows, Hk, g]
//   mask         [rows, W], which window slots a row sees
//   late         [rows], which rows use the state after `block` kept rows
//
// Returns what is wrong, or null.
const char* delta_rule(ThreadPool& pool, int64_t threads, const DeltaShape& s, const float* query, const float* key,
                       const float* value, const float* decay, const float* rate, const uint8_t* mask,
                       const uint8_t* late, const float* state, const KeptRows& kept, float* out);

// The state after the first `block` kept rows, in place.
void delta_fold(ThreadPool& pool, int64_t threads, const DeltaShape& s, const KeptRows& kept, float* state);

struct ConvShape {
  int64_t rows, heads, width, taps, kept;
  int64_t place;  // of the first row; kept rows from there on are not read
  bool silu;
};

// Rows `x` [rows, heads, width] with those before them, each times a column of `weight` [heads, width, taps], the oldest
// first; `before` [taps - 1, stride] are places among `kept` [heads, kept, width] and the rows, negative for none.
void short_conv(ThreadPool& pool, int64_t threads, const ConvShape& s, const float* weight, const float* kept,
                const float* x, const int32_t* before, int64_t stride, float* out);

}  // namespace jaxspec
