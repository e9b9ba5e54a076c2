// Registers of LANES outputs each, as wide as the processor has them: what tiles.hpp and attention.hpp compute with.
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
inline Ints shifted(Ints a) {
    return BY < 0 ? _mm512_srli_epi16(a, BY < 0 ? -BY : 0) : _mm512_slli_epi16(a, BY < 0 ? 0 : BY);
}
inline Ints plus_pairs(Ints a, Ints pairs) {  // each lane's two numbers of 16 bits are added to its one of 32
    return _mm512_add_epi32(a, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
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
inline Ints larger(Ints a, Ints b) { return _mm512_max_epi32(a, b); }
inline int32_t max_of(Ints a) { return _mm512_reduce_max_epi32(a); }
inline Ints plus(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints bits_of_size(Floats a) { return _mm512_castps_si512(size(a)); }
inline void sums_of(Ints a, Ints b, int32_t* to) {  // of all lanes of each
    const __m512i low = _mm512_unpacklo_epi32(a, b), high = _mm512_unpackhi_epi32(a, b);
    const __m512i found = _mm512_add_epi32(low, high);
    __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(found), _mm512_extracti64x4_epi64(found, 1));
    __m128i last = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    last = _mm_add_epi32(last, _mm_shuffle_epi32(last, 0x4e));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), last);
}
inline Ints to_ints(Floats a) { return _mm512_cvtps_epi32(a); }
inline void store_bytes(int8_t* to, Ints a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(a));
}
inline Floats plus(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats less_by(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats divided(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats smaller(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats where(uint64_t bits, Floats a, Floats b) {
    return _mm512_mask_mov_ps(b, static_cast<__mmask16>(bits), a);
}
inline Floats rounded(Floats a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats times_power(Floats a, Floats power) { return _mm512_scalef_ps(a, power); }  // a * 2^power
inline float first_of(Floats a) { return _mm512_cvtss_f32(a); }
inline Floats deal_low(Floats a, Floats b) {  // a[0], b[0], a[1], b[1] ...
    const Ints places = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    return _mm512_permutex2var_ps(a, places, b);
}
inline Floats deal_high(Floats a, Floats b) {  // the same of the upper halves
    const Ints places = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    return _mm512_permutex2var_ps(a, places, b);
}
inline uint64_t bits_of(const uint8_t* from) {  // of 64 bytes, which are not 0
    const __m512i found = _mm512_loadu_si512(from);
    return _mm512_test_epi8_mask(found, found);
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
inline Ints shifted(Ints a) {
    return BY < 0 ? _mm256_srli_epi16(a, BY < 0 ? -BY : 0) : _mm256_slli_epi16(a, BY < 0 ? 0 : BY);
}
inline Ints plus_pairs(Ints a, Ints pairs) {
    return _mm256_add_epi32(a, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
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
inline Ints larger(Ints a, Ints b) { return _mm256_max_epi32(a, b); }
inline int32_t max_of(Ints a) {
    __m128i found = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    found = _mm_max_epi32(found, _mm_shuffle_epi32(found, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(found, _mm_shuffle_epi32(found, 0xb1)));
}
inline Ints plus(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline Ints bits_of_size(Floats a) { return _mm256_castps_si256(size(a)); }
inline void sums_of(Ints a, Ints b, int32_t* to) {  // of all lanes of each
    const __m256i half = _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    __m128i last = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    last = _mm_add_epi32(last, _mm_shuffle_epi32(last, 0x4e));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), last);
}
inline Ints to_ints(Floats a) { return _mm256_cvtps_epi32(a); }
inline void store_bytes(int8_t* to, Ints a) {
    const __m128i found = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(found, found));
}
inline Floats plus(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats less_by(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats divided(Floats a, Floats b) { return _mm256_div_ps(a, b); }
inline Floats smaller(Floats a, Floats b) { return _mm256_min_ps(a, b); }
inline Floats where(uint64_t bits, Floats a, Floats b) {
    const Ints places = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const Ints found = _mm256_cmpeq_epi32(_mm256_and_si256(repeat(static_cast<int32_t>(bits)), places), places);
    return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(found));
}
inline Floats rounded(Floats a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats times_power(Floats a, Floats power) {  // a * 2^power, for what stays a normal number
    return times(a, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(to_ints(power), repeat(127)), 23)));
}
inline float first_of(Floats a) { return _mm256_cvtss_f32(a); }
inline Floats deal_low(Floats a, Floats b) {  // a[0], b[0], a[1], b[1] ...
    return _mm256_permute2f128_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b), 0x20);
}
inline Floats deal_high(Floats a, Floats b) {  // the same of the upper halves
    return _mm256_permute2f128_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b), 0x31);
}
inline uint64_t bits_of(const uint8_t* from) {  // of 64 bytes, which are not 0
    const Ints none = _mm256_setzero_si256();
    const uint32_t low = _mm256_movemask_epi8(_mm256_cmpeq_epi8(load(from), none));
    const uint32_t high = _mm256_movemask_epi8(_mm256_cmpeq_epi8(load(from + 32), none));
    return ~(static_cast<uint64_t>(high) << 32 | low);
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
constexpr bool VNNI = true;
#else
constexpr bool VNNI = false;
#endif
constexpr bool SIGNED_BYTES = !VNNI;  // else weights of 8 bits are multiplied as unsigned ones, 128 higher

// Return e^x, of x from -87 to 88: less is taken for -87. The error is some 1e-7 of it.
inline Floats exp_of(Floats x) {
    x = larger(repeat(-87.0f), x);  // in this order: what is not a number stays so
    const Floats power = rounded(times(x, repeat(1.44269504f)));  // 1 / ln 2
    Floats rest = times_plus(power, repeat(-0.693359375f), x);    // ln 2 in two parts, the first one exact
    rest = times_plus(power, repeat(2.12194440e-4f), rest);
    Floats sum = repeat(1.0f / 720);  // the series of e^rest
    for (const float next : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        sum = times_plus(sum, rest, repeat(next));
    return times_power(sum, power);
}
inline Floats tanh_of(Floats x) {
    const Floats grown = exp_of(smaller(repeat(80.0f), plus(x, x)));
    return less_by(repeat(1.0f), divided(repeat(2.0f), plus(grown, repeat(1.0f))));
}

// Numbers in 16 bits, as a cache keeps them where weights have few bits, are read as floats.
struct Half {
    uint16_t bits;
};
inline Floats floats_of(const Half* from) { return of_halves(reinterpret_cast<const uint8_t*>(from)); }
inline float float_of(float from) { return from; }
inline float float_of_bits(int32_t bits) {
    float made;
    std::memcpy(&made, &bits, sizeof(made));
    return made;
}
inline float float_of(Half from) { return _cvtsh_ss(from.bits); }
// Return a number in 16 bits, or the largest one that there is. What is not a number stays so.
inline Half half_of(float from) {
    const __m128 least = _mm_max_ss(_mm_set_ss(-65504.0f), _mm_set_ss(from));
    return {static_cast<uint16_t>(_cvtss_sh(_mm_cvtss_f32(_mm_min_ss(_mm_set_ss(65504.0f), least)), 0))};
}

// Turn a square of LANES x LANES numbers: to[column][row] = from[row][column].
template <class Number>
inline void turn_square(const Number* from, int64_t from_stride, float* to, int64_t to_stride) {
    constexpr int STEPS = LANES == 16 ? 4 : 3;
    Floats lines[LANES], next[LANES];
    for (int i = 0; i < LANES; ++i) lines[i] = floats_of(from + i * from_stride);
    for (int step = 0; step < STEPS; ++step) {  // each step deals two halves of the lines like a pack of cards
        for (int i = 0; i < LANES / 2; ++i) {
            next[2 * i] = deal_low(lines[i], lines[i + LANES / 2]);
            next[2 * i + 1] = deal_high(lines[i], lines[i + LANES / 2]);
        }
        for (int i = 0; i < LANES; ++i) lines[i] = next[i];
    }
    for (int i = 0; i < LANES; ++i) store(to + i * to_stride, lines[i]);
}

inline int32_t four(const int8_t* from) {
    int32_t value;
    std::memcpy(&value, from, 4);
    return value;
}

}  // namespace
