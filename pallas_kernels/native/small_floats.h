// Small formats of quantised weights as sixteen float lanes. Every conversion is exact.
#pragma once

#include "lanes.h"

namespace jaxspec {

// A float32 of its upper 16 bits and of the upper four bits of `low`, which are the next ones.
inline float short_scale(int high, int low) {
  const uint32_t bits = static_cast<uint32_t>(high) << 16 | static_cast<uint32_t>(low & 0xF0) << 8;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Sixteen of them.
inline Lanes load_short_scales(const uint8_t* high, const uint8_t* low) {
  uint16_t upper[kLanes];
  uint32_t bits[kLanes];
  float scales[kLanes];
  std::memcpy(upper, high, sizeof upper);
  for (int i = 0; i < kLanes; i++)
    bits[i] = static_cast<uint32_t>(upper[i]) << 16 | static_cast<uint32_t>(low[i] & 0xF0) << 8;
  std::memcpy(scales, bits, sizeof scales);
  return load(scales);
}

// Half of the power of two that a scale of MXFP4 stands for, 2^(code - 128): the largest one is finite.
inline uint32_t half_power_bits(uint8_t code) { return code < 2 ? 0x00200000u << code : (code - 1u) << 23; }
inline float half_power(uint8_t code) {
  const uint32_t bits = half_power_bits(code);
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Sixteen of them.
inline Lanes load_half_powers(const uint8_t* p) {
  uint32_t bits[kLanes];
  float scales[kLanes];
  for (int i = 0; i < kLanes; i++) bits[i] = half_power_bits(p[i]);
  std::memcpy(scales, bits, sizeof scales);
  return load(scales);
}

// What the codes of MXFP4 stand for: doubled, and plus twelve, so that they are small and not negative.
alignas(16) constexpr uint8_t kE2M1Codes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// Sixteen float8_e4m3fn. Its exponent is that of float16 less 8, also where numbers are denormal. The code of NaN, which
// readers refuse, counts as 480.
inline Lanes load_e4m3(const uint8_t* p) {
  uint16_t half[kLanes];
  for (int i = 0; i < kLanes; i++) half[i] = static_cast<uint16_t>((p[i] & 0x80) << 8 | (p[i] & 0x7F) << 7);
  return load_half(half) * set(256.0f);
}

// Sixteen times the double of a float of one sign bit, two of exponent and one of fraction, from bit `kFrom` of each byte.
template <int kFrom>
inline Lanes load_e2m1_doubled(const uint8_t* p) {
  uint16_t half[kLanes];
  for (int i = 0; i < kLanes; i++) {
    const int code = p[i] >> kFrom;
    half[i] = static_cast<uint16_t>((code & 8) << 12 | (code & 7) << 9);
  }
  return load_half(half) * set(32768.0f);
}

// What four-bit codes of a group stand for: `(code - zero) * scale`, where `Levels` would round twice. Bits of a code
// above the fourth are ignored.
struct Steps {
#if defined(__AVX512F__)
  Lanes table;
  Steps(float scale, float zero) : table((iota() - set(zero)) * set(scale)) {}
  Lanes operator[](Codes c) const { return {_mm512_permutexvar_ps(c.v, table.v)}; }
#else
  Lanes scale, zero;
  Steps(float scale_, float zero_) : scale(set(scale_)), zero(set(zero_)) {}
  Lanes operator[](Codes c) const { return (to_float(keep_bits(c, 15)) - zero) * scale; }
#endif
};

}  // namespace jaxspec
