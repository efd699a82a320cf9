// Tiles of sixteen rows times packed groups with AMX: the sums of `multiply_group`, and the same floats in its order.
//
// Codes are unpacked as signed bytes, less the code that means zero: the integer sums need no correction. Some units of
// some groups are unpacked at a time. All rows meet them while they are in the first-level cache.
#pragma once

#include <immintrin.h>

#include "../native/amx.h"

namespace jaxspec {
namespace detail {

constexpr int kTogether = 4, kSpan = 8;  // groups and units that are unpacked at a time

struct TotalsTag;

// Compilers may not know that instructions for tiles read memory and write it.
[[gnu::always_inline]] inline void memory_fence() { asm volatile("" ::: "memory"); }

// Tile 0 for sums, 1 for a unit of the inputs of sixteen rows, 2 for the codes of a unit.
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

// total[g][r][o] = row r of `tiles` tiles times output o of group g. `row_size` is the size of a quantised row.
template <class Format, int kPlanes>
void multiply_tiles(const float* x, int64_t tiles, int64_t row_size, int64_t units, const uint8_t* const* groups,
                    int64_t num_groups, Lanes* totals) {
  constexpr int kRows = kAmxRows, kSums = kRows * kLanes;
  static_assert(Format::kParts == 1, "one sum for a unit");
  alignas(64) uint8_t codes[kTogether][kSpan][8][64];
  alignas(64) int32_t sums[2][kPlanes * kSums];
  UnitScales<Format> scales[kTogether][kSpan];
  configure_tiles();
  for (int64_t begin = 0; begin < units; begin += kSpan) {
    const int64_t span = std::min<int64_t>(kSpan, units - begin);
    for (int64_t g = 0; g < num_groups; g++) {
      for (int64_t u = 0; u < span; u++) {
        const int unit = static_cast<int>((begin + u) % Format::kUnits);
        const uint8_t* block = groups[g] + (begin + u) / Format::kUnits * kGroup * Format::kBytes;
        const uint8_t* low = block + kGroup * Format::kLowBits + unit * 64 * Format::kLow;
        const uint8_t* high = block + kGroup * Format::kHighBits + unit * 64 * Format::kHigh;
        const __m512i zero_code = _mm512_set1_epi8(static_cast<char>(Format::kZero));
#pragma GCC unroll 8
        for (int quad = 0; quad < 8; quad++)
          _mm512_store_si512(codes[g][u][quad], _mm512_sub_epi8(codes_of<Format>(low, high, quad).v, zero_code));
        scales[g][u] = UnitScales<Format>(block, load_scale<Format>(block), load_zero_point<Format>(block), unit);
      }
    }
    const auto tile_of = [&](int64_t tile) JAXSPEC_INLINE {
      Quantised rows(const_cast<float*>(x) + tile * kRows * row_size, kRows, units, kPlanes);
      rows.skip<kPlanes, 1>(kRows * begin);
      return rows;
    };
    // Write the sums of a unit to sums[u % 2].
    const auto add_up_unit = [&](int64_t tile, int64_t g, int64_t u) JAXSPEC_INLINE {
      const int8_t* inputs = tile_of(tile).codes + u * kRows * kPlanes * kUnit;
      memory_fence();
      _tile_loadd(2, codes[g][u], 64);
#pragma GCC unroll 2
      for (int plane = 0; plane < kPlanes; plane++) {
        _tile_loadd(1, inputs + plane * kUnit, kPlanes * kUnit);
        _tile_zero(0);
        _tile_dpbssd(0, 1, 2);
        _tile_stored(0, sums[u % 2] + plane * kSums, 64);
      }
      memory_fence();
    };
    for (int64_t tile = 0; tile < tiles; tile++) {
      const Quantised rows = tile_of(tile);
      for (int64_t g = 0; g < num_groups; g++) {
        Lanes* kept = totals + (g * tiles + tile) * kRows;
        Lanes total[kRows];
#pragma GCC unroll 16
        for (int r = 0; r < kRows; r++) total[r] = begin ? kept[r] : zero();
        add_up_unit(tile, g, 0);
        for (int64_t u = 0; u < span; u++) {
          // The next sums begin before these are used.
          if (u + 1 < span) add_up_unit(tile, g, u + 1);
          const UnitScales<Format>& w = scales[g][u];
          const float *row_scale = rows.scale + u * kRows, *row_sum = rows.sum + u * kRows;
#pragma GCC unroll 16
          for (int r = 0; r < kRows; r++) {
            Int32s sum{_mm512_load_si512(sums[u % 2] + r * kLanes)};
            if constexpr (kPlanes == 2)
              sum = shift_left(sum, 8) + Int32s{_mm512_load_si512(sums[u % 2] + kSums + r * kLanes)};
            Lanes exact = to_float(sum);
            if constexpr (Format::kZeroPoint) exact = fma(w.zero_point, set(-row_sum[r]), exact);
            total[r] = fma(exact * w.scale[0], set(row_scale[r]), total[r]);
            if constexpr (Format::kMinimum) total[r] = fma(w.minimum, set(row_sum[r]), total[r]);
          }
        }
#pragma GCC unroll 16
        for (int r = 0; r < kRows; r++) kept[r] = total[r];
      }
    }
  }
  _tile_release();
}

}  // namespace detail
}  // namespace jaxspec
