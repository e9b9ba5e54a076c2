// Registers of LANES outputs each, as wide as the processor has them: what tile_product.cpp computes with.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

constexpr int LANES = 16;
using Ints = __m512i;
using Floats = __m512;

inline Ints load(const uint8_t* from) { return _mm512_loadu_si512(from); }
inline Ints repeat(int32_t value) { return _mm512_set1_epi32(value); }
inline Ints repeat_byte(char value) { return _mm512_set1_epi8(value); }
inline Ints both(Ints a, Ints b) { return _mm512_and_si512(a, b); }
inline Ints either(Ints a, Ints b) { return _mm512_or_si512(a, b); }
template <int BY>
inline Ints shift(Ints a) {
    return BY < 0 ? _mm512_srli_epi16(a, BY < 0 ? -BY : 0) : _mm512_slli_epi16(a, BY < 0 ? 0 : BY);
}
inline Ints other_signs(Ints a) { return _mm512_xor_si512(a, repeat_byte(-128)); }
inline Floats to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
inline Floats repeat(float value) { return _mm512_set1_ps(value); }
inline Floats zero() { return _mm512_setzero_ps(); }
inline Floats times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats times_plus(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline void store(float* to, Floats a) { _mm512_storeu_ps(to, a); }
inline Floats floats_of(const float* from) { return _mm512_loadu_ps(from); }
inline Floats of_halves(const uint8_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline Floats size(Floats a) { return _mm512_abs_ps(a); }
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline float max_of(Floats a) { return _mm512_reduce_max_ps(a); }
inline float sum_of(Floats a) { return _mm512_reduce_add_ps(a); }
inline int32_t sum_of(Ints a) { return _mm512_reduce_add_epi32(a); }
inline Ints to_ints(Floats a) { return _mm512_cvtps_epi32(a); }
inline void store_bytes(int8_t* to, Ints a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(a));
}
template <bool SIGNED>
inline Floats of_bytes(const uint8_t* from) {
    const __m128i found = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return to_floats(SIGNED ? _mm512_cvtepi8_epi32(found) : _mm512_cvtepu8_epi32(found));
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

constexpr int LANES = 8;
using Ints = __m256i;
using Floats = __m256;

inline Ints load(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline Ints repeat(int32_t value) { return _mm256_set1_epi32(value); }
inline Ints repeat_byte(char value) { return _mm256_set1_epi8(value); }
inline Ints both(Ints a, Ints b) { return _mm256_and_si256(a, b); }
inline Ints either(Ints a, Ints b) { return _mm256_or_si256(a, b); }
template <int BY>
inline Ints shift(Ints a) {
    return BY < 0 ? _mm256_srli_epi16(a, BY < 0 ? -BY : 0) : _mm256_slli_epi16(a, BY < 0 ? 0 : BY);
}
inline Ints other_signs(Ints a) { return _mm256_xor_si256(a, repeat_byte(-128)); }
inline Floats to_floats(Ints a) { return _mm256_cvtepi32_ps(a); }
inline Floats repeat(float value) { return _mm256_set1_ps(value); }
inline Floats zero() { return _mm256_setzero_ps(); }
inline Floats times(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats times_plus(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline void store(float* to, Floats a) { _mm256_storeu_ps(to, a); }
inline Floats floats_of(const float* from) { return _mm256_loadu_ps(from); }
inline Floats of_halves(const uint8_t* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline Floats size(Floats a) { return _mm256_andnot_ps(repeat(-0.0f), a); }
inline Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline float max_of(Floats a) {
    __m128 found = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    found = _mm_max_ps(found, _mm_movehl_ps(found, found));
    return _mm_cvtss_f32(_mm_max_ss(found, _mm_movehdup_ps(found)));
}
inline float sum_of(Floats a) {
    __m128 found = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    found = _mm_add_ps(found, _mm_movehl_ps(found, found));
    return _mm_cvtss_f32(_mm_add_ss(found, _mm_movehdup_ps(found)));
}
inline int32_t sum_of(Ints a) {
    __m128i found = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    found = _mm_add_epi32(found, _mm_shuffle_epi32(found, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(found, _mm_shuffle_epi32(found, 0xb1)));
}
inline Ints to_ints(Floats a) { return _mm256_cvtps_epi32(a); }
inline void store_bytes(int8_t* to, Ints a) {
    const __m128i found = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(found, found));
}
template <bool SIGNED>
inline Floats of_bytes(const uint8_t* from) {
    const __m128i found = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    return to_floats(SIGNED ? _mm256_cvtepi8_epi32(found) : _mm256_cvtepu8_epi32(found));
}

#else
#error "a processor with AVX2 is needed"
#endif

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr bool SIGNED_BYTES = false;  // weights of 8 bits are multiplied as unsigned ones, 128 higher
#else
constexpr bool SIGNED_BYTES = true;
#endif

inline int32_t four(const int8_t* from) {
    int32_t value;
    std::memcpy(&value, from, 4);
    return value;
}

}  // namespace
