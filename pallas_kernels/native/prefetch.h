// Fetching ahead of use.
#pragma once

#include <cstdint>

namespace jaxspec {

// Into the second-level cache: it keeps more requests to the memory going than the first one can. Any address will do.
inline void prefetch(const uint8_t* p) {
#if defined(__GNUC__)
  __builtin_prefetch(p, 0, 2);
#endif
}

// Into the first-level cache, which takes few requests at once: what the second one has by now.
inline void prefetch_soon(const uint8_t* p) {
#if defined(__GNUC__)
  __builtin_prefetch(p, 0, 3);
#endif
}

inline void prefetch_bytes(const uint8_t* p, int64_t count) {
  for (int64_t i = 0; i < count; i += 64) prefetch(p + i);
}

}  // namespace jaxspec
