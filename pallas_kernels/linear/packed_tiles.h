// Rows times packed groups with AMX: the sums of `multiply_group`, and the same floats in its order.
//
// A tile has sixteen rows of 32 bytes: sixteen rows of activations of eight bits, or eight of sixteen bits, whose two
// planes are rows of their own. Writing a tile of sums takes as long whatever its size, and processors do little else
// meanwhile: fewer, larger tiles are faster. Codes are unpacked as signed bytes, less the code that means zero: the
// integer sums need no correction.
#pragma once

#include <immintrin.h>

#include "../native/amx.h"

namespace jaxspec {
namespace detail {

// Units whose codes are kept for all tiles of rows, and places for sums that wait to be scaled.
constexpr int kSpan = 32, kWaiting = 4;

struct TotalsTag;

// Compilers may not know that instructions for tiles read memory and write it.
[[gnu::always_inline]] inline void memory_fence() { asm volatile("" ::: "memory"); }

// Tile 0 for sums, 1 for a unit of the inputs, 2 for its codes.
inline void configure_tiles() {
  [[maybe_unused]] static const bool allowed = ask_for_amx();
  struct alignas(64) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, kUnit, 64};
    uint8_t rows[16] = {16, 16, kUnit / 4};
  } config;
  memory_fence();
  _tile_loadconfig(&config);
}

// y[r * y_stride + o] for `rows` rows and the first `count` outputs of a group, from `skip` on. Tiles must be
// configured. `ahead` and `step` are those of `multiply_group`.
template <class Format, int kPlanes>
void multiply_group_tiles(int64_t rows, const float* x, int64_t row_size, int64_t units, const uint8_t* group,
                          const uint8_t* ahead, int64_t step, float* y, int64_t y_stride, int64_t skip, int64_t count) {
  static_assert(Format::kParts == 1 && 16 * kUnit <= 4 * kBeyond, "one sum for a unit; a tile ends within `kBeyond`");
  constexpr int kRows = 16 / kPlanes;
  alignas(64) uint8_t codes[kSpan][8][64];
  alignas(64) int32_t sums[kWaiting][kRows * kPlanes][kLanes];
  UnitScales<Format> scales[kSpan];
  const int64_t tiles = (rows + kRows - 1) / kRows;
  auto* kept = units > kSpan ? reinterpret_cast<Lanes*>(scratch<TotalsTag>(tiles * kRows * kLanes)) : nullptr;
  // Without inputs there is one empty span, after which totals are zero.
  for (int64_t begin = 0; begin == 0 || begin < units; begin += kSpan) {
    const int64_t span = std::min<int64_t>(kSpan, units - begin);
    for (int64_t tile = 0; tile < tiles; tile++) {
      const int64_t first = tile * kRows, some = std::min<int64_t>(kRows, rows - first);
      Quantised in(const_cast<float*>(x) + first * row_size, some, units, kPlanes);
      in.skip<kPlanes, 1>(some * begin);
      const auto unpack = [&](int64_t u) JAXSPEC_INLINE {
        const int unit = static_cast<int>((begin + u) % Format::kUnits);
        const uint8_t* block = group + (begin + u) / Format::kUnits * kGroup * Format::kBytes;
        const uint8_t* low = block + kGroup * Format::kLowBits + unit * 64 * Format::kLow;
        const uint8_t* high = block + kGroup * Format::kHighBits + unit * 64 * Format::kHigh;
        const __m512i zero_code = _mm512_set1_epi8(static_cast<char>(Format::kZero));
#pragma GCC unroll 8
        for (int quad = 0; quad < 8; quad++)
          _mm512_store_si512(codes[u][quad], _mm512_sub_epi8(codes_of<Format>(low, high, quad).v, zero_code));
        scales[u] = UnitScales<Format>(block, load_scale<Format>(block), load_zero_point<Format>(block), unit);
      };
      // The sums of a unit are begun three units before they are scaled, and written just before the next unit's begin.
      // A tile with fewer rows than `kRows` reads what lies after them, whose sums nobody uses.
      const auto begin_sums = [&](int64_t u) JAXSPEC_INLINE {
        const int8_t* inputs = in.codes + u * some * kPlanes * kUnit;
        memory_fence();
        _tile_loadd(2, codes[u], 64);
        _tile_loadd(1, inputs, kUnit);
        _tile_zero(0);
        _tile_dpbssd(0, 1, 2);
        memory_fence();
      };
      const auto write = [&](int64_t u) JAXSPEC_INLINE {
        memory_fence();
        _tile_stored(0, sums[u % kWaiting], 64);
        memory_fence();
      };
      Lanes total[kRows];
#pragma GCC unroll 16
      for (int r = 0; r < kRows; r++) total[r] = begin ? kept[first + r] : zero();
      const auto scale = [&](int64_t u) JAXSPEC_INLINE {
        const UnitScales<Format>& w = scales[u];
        const float *row_scale = in.scale + u * some, *row_sum = in.sum + u * some;
#pragma GCC unroll 16
        for (int r = 0; r < kRows; r++) {
          Int32s sum{_mm512_load_si512(sums[u % kWaiting][r * kPlanes])};
          if constexpr (kPlanes == 2)
            sum = shift_left(sum, 8) + Int32s{_mm512_load_si512(sums[u % kWaiting][r * kPlanes + 1])};
          Lanes exact = to_float(sum);
          if constexpr (Format::kZeroPoint) exact = fma(w.zero_point, set(-row_sum[r]), exact);
          total[r] = fma(exact * w.scale[0], set(row_scale[r]), total[r]);
          if constexpr (Format::kMinimum) total[r] = fma(w.minimum, set(row_sum[r]), total[r]);
        }
      };
      const auto take = [&](int64_t u) JAXSPEC_INLINE {
        if (tile == 0) unpack(u);
        for (int64_t line = 0; line < step; line += 64) prefetch(ahead + line);
        ahead += step;
      };
      for (int64_t u = 0; u < std::min<int64_t>(5, span); u++) take(u);
      begin_sums(0);
      write(0);
      if (span > 1) begin_sums(1);
      if (span > 1) write(1);
      if (span > 2) begin_sums(2);
      int64_t u = 0;
#pragma GCC unroll 2
      for (; u < span - 5; u++) {
        take(u + 5);
        write(u + 2);
        begin_sums(u + 3);
        scale(u);
      }
      for (; u < span; u++) {
        if (u + 2 < span) write(u + 2);
        if (u + 3 < span) begin_sums(u + 3);
        scale(u);
      }
#pragma GCC unroll 16
      for (int r = 0; r < kRows; r++) {
        if (begin + span < units) {
          kept[first + r] = total[r];
        } else if (r < some) {
          store_outputs(total[r], skip, count, y + (first + r) * y_stride);
        }
      }
    }
  }
}

}  // namespace detail
}  // namespace jaxspec
