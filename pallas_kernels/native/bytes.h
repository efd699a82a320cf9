// Products of small integers: 64 unsigned bytes, four for each of sixteen outputs, times four signed bytes.
//
// The sums are exact in every instruction set, so the bits of a result depend on none of them.
#pragma once

#include "lanes.h"

namespace jaxspec {

// Four signed bytes, the activations of four consecutive inputs.
inline int32_t load_four(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, sizeof four);
  return four;
}

// Write integers as 256 times those at `high` plus those at `low`; returns their sum.
inline int32_t split_planes(int8_t* high, int8_t* low, const int32_t (&x)[kLanes]) {
  int32_t sum = 0;
  for (int i = 0; i < kLanes; i++) {
    const int32_t upper = (x[i] + 128) >> 8;
    high[i] = static_cast<int8_t>(upper);
    low[i] = static_cast<int8_t>(x[i] - upper * 256);
    sum += x[i];
  }
  return sum;
}

#if defined(__AVX512F__)

struct Bytes {
  __m512i v;
};
struct Int32s {
  __m512i v;
};

inline Bytes load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline Bytes keep(Bytes a, int bits) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(static_cast<char>(bits)))}; }
// Bits cross from byte to byte: `keep` follows.
inline Bytes shift_right(Bytes a, int n) { return {_mm512_srli_epi16(a.v, n)}; }
inline Bytes shift_left(Bytes a, int n) { return {_mm512_slli_epi16(a.v, n)}; }
inline Bytes operator|(Bytes a, Bytes b) { return {_mm512_or_si512(a.v, b.v)}; }
// The entry of a table of sixteen for each byte, which is below sixteen.
inline Bytes look_up(const uint8_t* table, Bytes a) {
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table))), a.v)};
}
inline Int32s set_ints(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline Int32s operator+(Int32s a, Int32s b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Lanes to_float(Int32s a) { return {_mm512_cvtepi32_ps(a.v)}; }
// Write sixteen numbers below 128 in magnitude as the nearest integers, ties to even; returns their sum.
inline int32_t store_rounded(int8_t* p, Lanes a) {
  __m512i rounded = _mm512_cvtps_epi32(a.v);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(rounded));
  return _mm512_reduce_add_epi32(rounded);
}
// Likewise numbers below 2^15, as 256 times the integers at `high` plus those at `low`.
inline int32_t store_planes(int8_t* high, int8_t* low, Lanes a) {
  __m512i rounded = _mm512_cvtps_epi32(a.v);
  __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(rounded, _mm512_set1_epi32(128)), 8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(high), _mm512_cvtepi32_epi8(upper));
  __m512i lower = _mm512_sub_epi32(rounded, _mm512_slli_epi32(upper, 8));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(low), _mm512_cvtepi32_epi8(lower));
  return _mm512_reduce_add_epi32(rounded);
}
inline Int32s times_256(Int32s a) { return {_mm512_slli_epi32(a.v, 8)}; }

#if defined(__AVX512VNNI__)
template <int kBits>
inline Int32s dot(Int32s sum, Bytes codes, int32_t inputs) {
  return {_mm512_dpbusd_epi32(sum.v, codes.v, _mm512_set1_epi32(inputs))};
}
#else
// Pairs of products are added in sixteen bits, where two products of a code below 128 fit.
inline Int32s dot_small(Int32s sum, Bytes codes, int32_t inputs) {
  __m512i pairs = _mm512_maddubs_epi16(codes.v, _mm512_set1_epi32(inputs));
  return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))};
}
inline Int32s times_128(Int32s a) { return {_mm512_slli_epi32(a.v, 7)}; }
#endif

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

struct Bytes {
  __m256i v[2];
};
struct Int32s {
  __m256i v[2];
};

inline __m256i load_32(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Bytes load_bytes(const uint8_t* p) { return {load_32(p), load_32(p + 32)}; }
inline Bytes keep(Bytes a, int bits) {
  __m256i mask = _mm256_set1_epi8(static_cast<char>(bits));
  return {_mm256_and_si256(a.v[0], mask), _mm256_and_si256(a.v[1], mask)};
}
inline Bytes shift_right(Bytes a, int n) { return {_mm256_srli_epi16(a.v[0], n), _mm256_srli_epi16(a.v[1], n)}; }
inline Bytes shift_left(Bytes a, int n) { return {_mm256_slli_epi16(a.v[0], n), _mm256_slli_epi16(a.v[1], n)}; }
inline Bytes operator|(Bytes a, Bytes b) {
  return {_mm256_or_si256(a.v[0], b.v[0]), _mm256_or_si256(a.v[1], b.v[1])};
}
inline Bytes look_up(const uint8_t* table, Bytes a) {
  const __m256i both = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
  return {_mm256_shuffle_epi8(both, a.v[0]), _mm256_shuffle_epi8(both, a.v[1])};
}
inline Int32s set_ints(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Int32s operator+(Int32s a, Int32s b) {
  return {_mm256_add_epi32(a.v[0], b.v[0]), _mm256_add_epi32(a.v[1], b.v[1])};
}
inline Lanes to_float(Int32s a) { return {_mm256_cvtepi32_ps(a.v[0]), _mm256_cvtepi32_ps(a.v[1])}; }
inline int32_t store_rounded(int8_t* p, Lanes a) {
  int32_t rounded[kLanes], sum = 0;
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(rounded), _mm256_cvtps_epi32(a.v[0]));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(rounded + 8), _mm256_cvtps_epi32(a.v[1]));
  for (int i = 0; i < kLanes; i++) {
    p[i] = static_cast<int8_t>(rounded[i]);
    sum += rounded[i];
  }
  return sum;
}
inline int32_t store_planes(int8_t* high, int8_t* low, Lanes a) {
  int32_t rounded[kLanes];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(rounded), _mm256_cvtps_epi32(a.v[0]));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(rounded + 8), _mm256_cvtps_epi32(a.v[1]));
  return split_planes(high, low, rounded);
}
inline Int32s times_256(Int32s a) { return {_mm256_slli_epi32(a.v[0], 8), _mm256_slli_epi32(a.v[1], 8)}; }
inline __m256i dot_half(__m256i sum, __m256i codes, int32_t inputs) {
  __m256i pairs = _mm256_maddubs_epi16(codes, _mm256_set1_epi32(inputs));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
inline Int32s dot_small(Int32s sum, Bytes codes, int32_t inputs) {
  return {dot_half(sum.v[0], codes.v[0], inputs), dot_half(sum.v[1], codes.v[1], inputs)};
}
inline Int32s times_128(Int32s a) { return {_mm256_slli_epi32(a.v[0], 7), _mm256_slli_epi32(a.v[1], 7)}; }

#else

// The four bytes of an output are an integer, the first one lowest.
struct Bytes {
  FourInts v[4];
};
struct Int32s {
  FourInts v[4];
};

template <class T, class F>
inline T each_four(F f) {
  return {{f(0), f(1), f(2), f(3)}};
}
inline Bytes load_bytes(const uint8_t* p) {
  Bytes a;
  std::memcpy(a.v, p, sizeof a.v);
  return a;
}
inline Bytes keep(Bytes a, int bits) {
  return each_four<Bytes>([&](int i) { return a.v[i] & static_cast<int32_t>(bits * 0x01010101u); });
}
inline Bytes shift_right(Bytes a, int n) { return each_four<Bytes>([&](int i) { return a.v[i] >> n; }); }
inline Bytes shift_left(Bytes a, int n) { return each_four<Bytes>([&](int i) { return a.v[i] << n; }); }
inline Bytes operator|(Bytes a, Bytes b) { return each_four<Bytes>([&](int i) { return a.v[i] | b.v[i]; }); }
inline Bytes look_up(const uint8_t* table, Bytes a) {
  uint8_t bytes[4 * kLanes];
  std::memcpy(bytes, a.v, sizeof bytes);
  for (uint8_t& byte : bytes) byte = table[byte];
  return load_bytes(bytes);
}
inline Int32s set_ints(int32_t x) { return each_four<Int32s>([=](int) { return FourInts{x, x, x, x}; }); }
inline Int32s operator+(Int32s a, Int32s b) { return each_four<Int32s>([&](int i) { return a.v[i] + b.v[i]; }); }
inline Lanes to_float(Int32s a) { return each([&](int i) { return __builtin_convertvector(a.v[i], Four); }); }
inline Int32s times_256(Int32s a) { return each_four<Int32s>([&](int i) { return a.v[i] << 8; }); }
// The nearest integers, ties to even, of numbers below 2^22.
inline void round_to(int32_t (&rounded)[kLanes], Lanes a) {
  float numbers[kLanes];
  store(numbers, round(a));
  for (int i = 0; i < kLanes; i++) rounded[i] = static_cast<int32_t>(numbers[i]);
}
inline int32_t store_planes(int8_t* high, int8_t* low, Lanes a) {
  int32_t rounded[kLanes];
  round_to(rounded, a);
  return split_planes(high, low, rounded);
}
inline int32_t store_rounded(int8_t* p, Lanes a) {
  int32_t rounded[kLanes], sum = 0;
  round_to(rounded, a);
  for (int i = 0; i < kLanes; i++) {
    p[i] = static_cast<int8_t>(rounded[i]);
    sum += rounded[i];
  }
  return sum;
}
template <int kBits>
inline Int32s dot(Int32s sum, Bytes codes, int32_t inputs) {
  const FourInts all = {inputs, inputs, inputs, inputs};
#if defined(__SSE2__)
  // Sixteen bits hold a byte of either kind; one instruction multiplies and adds two of them.
  const __m128i x = bits_as<__m128i>(all);
  const __m128i even = _mm_srai_epi16(_mm_slli_epi16(x, 8), 8), odd = _mm_srai_epi16(x, 8);
  return each_four<Int32s>([&](int i) {
    const __m128i c = bits_as<__m128i>(codes.v[i]), low = _mm_and_si128(c, _mm_set1_epi16(255));
    const __m128i products =
        _mm_add_epi32(_mm_madd_epi16(low, even), _mm_madd_epi16(_mm_srli_epi16(c, 8), odd));
    return sum.v[i] + bits_as<FourInts>(products);
  });
#else
  return each_four<Int32s>([&](int i) {
    const FourInts c = codes.v[i];
    return sum.v[i] + (c & 255) * (all << 24 >> 24) + (c >> 8 & 255) * (all << 16 >> 24) +
           (c >> 16 & 255) * (all << 8 >> 24) + (c >> 24 & 255) * (all >> 24);
  });
#endif
}

#endif

#if defined(__AVX2__) && !defined(__AVX512VNNI__)
template <int kBits>
inline Int32s dot(Int32s sum, Bytes codes, int32_t inputs) {
  if constexpr (kBits < 8) return dot_small(sum, codes, inputs);
  return dot_small(sum + times_128(dot_small(set_ints(0), keep(shift_right(codes, 7), 1), inputs)), keep(codes, 127),
                   inputs);
}
#endif

}  // namespace jaxspec
