// Attention of a few rows over a committed prefix and the window slots that each row's mask marks.
//
// A row's tokens are numbered by their place on its path: prefix slots first, then its window slots in ascending order,
// which for a path of a tree is the order of depth. Work is cut by that number into chunks of `kChunk` tokens, and the
// chunks' results are merged from the first to the last. So a token at the end of a path gives the same bits whether the
// path lies in the prefix or scattered over the window, alone or beside other rows, and on any number of threads.
#pragma once

#include "../native/parallel.h"

namespace jaxspec {

enum class CacheType { kFloat32, kBFloat16, kFloat16 };

struct AttentionShape {
  int64_t rows;      // that are computed; the buffers may hold more
  int64_t kv_heads;  // K
  int64_t group;     // G, query heads per KV head
  int64_t width;     // H
  int64_t slots;     // S
  int64_t window;    // W, columns of the mask
  int64_t length;    // of the prefix
  int64_t offset;    // window slot of the first row
  int64_t sliding;   // positions that a row sees; 0 for all
  float softcap = 0; // scores s become c tanh(s / c); 0 leaves them
  const float* sinks = nullptr;  // [K, G]: a score beside each query's own that weighs no value; null for none
};

// Rotate the rows' queries and keys, write keys and values behind the prefix, attend.
//
//   qkv       [rows, K, G + 2, H]: each KV head's queries, key and value
//   cos, sin  [rows, H / 2]
//   mask      [rows, W], which window slots a row sees; null for a causal chunk, whose row t sees rows 0..t
//   position  [rows], by which a sliding window cuts
//   key, value  cache, [K, S, H] of `type`
//   out       [rows, K, G, H]; null to write the cache only
//
// Returns what is wrong, or null.
const char* tree_attention(CacheType type, ThreadPool& pool, int64_t threads, const AttentionShape& s, const float* qkv,
                           const float* cos, const float* sin, const uint8_t* mask, const int32_t* position,
                           uint8_t* key, uint8_t* value, float* out);

}  // namespace jaxspec
