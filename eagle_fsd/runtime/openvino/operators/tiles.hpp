// Products with weights of few bits, kept as in a .gguf file: what tile_product.cpp runs.
//
// TILE outputs are computed side by side, one in each lane of a register. Their weights lie together, as
// tile_layout.py writes them: for each span of inputs a header of scales and minima, then for each CHUNK of inputs a
// plane of the integers' low bits and one of their high bits. Activations are rounded to 8 bits, with a scale for each
// CHUNK. A row's result does not depend on the rows beside it: the same operations run in the same order.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <type_traits>
#include <utility>

#include "registers.hpp"

namespace {

constexpr int TILE = 32, CHUNK = 32, MOST = 8;  // MOST: rows that are multiplied together
constexpr int SIDE = 2;                         // registers of outputs that share what is read of the rows
constexpr int64_t LINE = 4 * TILE;              // bytes of TILE times 4 weights of 8 bits
constexpr int64_t ALIGNED = 64;                 // bytes of a cache line
constexpr int64_t AHEAD = 5120;                 // bytes between what is multiplied and what is fetched

// How a ggml type keeps weights: w = scale * (integer - CENTRE) + minimum.
enum Scales { IN_8_BITS, IN_16_BITS, IN_32_BITS };  // those in 8 bits are of a span's own scale in 16 bits

template <int HIGH, int GROUP_, Scales SCALES_, bool MINIMA_, int CENTRE_>
struct Kind {
    static constexpr int high = HIGH;  // bits beside the lowest 4
    static constexpr int GROUP = GROUP_, CENTRE = CENTRE_;
    static constexpr Scales SCALES = SCALES_;
    static constexpr bool MINIMA = MINIMA_;
    static constexpr int64_t PLANE = LINE * (4 + HIGH);  // bytes of a CHUNK
    static constexpr int64_t STEP = TILE << SCALES_;     // bytes of TILE scales
};

// How many registers of weights are multiplied before pairs of products, which are added in 16 bits, are added up in
// 32 bits. So many fit: 8 * 2 * 15 * 127 < 2^15, and so on. With VNNI fours are added in 32 bits at once.
template <int HIGH>
constexpr int LONGEST_RUN = VNNI ? 8 : HIGH == 0 ? 8 : HIGH == 1 ? 4 : HIGH == 2 ? 2 : 1;

// Return sum + the products of weights, 4 in each lane, with 4 activations.
template <int HIGH>
inline Ints dot(Ints sum, Ints weights, Ints by) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    return _mm512_dpbusd_epi32(sum, weights, by);
#elif defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(sum, weights, by);
#else
    if constexpr (HIGH == 4)  // signed, since 2 * 255 * 127 would not fit; only an activation has a sign
        return _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(by, weights));
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16(weights, by));
#endif
}

// Call work(0) to work(COUNT - 1), with numbers that the compiler knows.
template <class Work, int... I>
inline void each_of(Work work, std::integer_sequence<int, I...>) {
    (work(std::integral_constant<int, I>{}), ...);
}
template <int COUNT, class Work>
inline void each(Work work) {
    each_of(work, std::make_integer_sequence<int, COUNT>{});
}

// Return register j of the integers of a CHUNK: inputs 4 j to 4 j + 3 of LANES outputs.
template <int HIGH, int j>
inline Ints weights_of(const uint8_t* plane) {
    if constexpr (HIGH == 4) {
        const Ints found = load(plane + LINE * j);
        return SIGNED_BYTES ? found : other_signs(found);
    }
    const Ints pair = load(plane + LINE * (j % 4));
    Ints found = both(j < 4 ? pair : shifted<-4>(pair), repeat_byte(0x0f));
    if constexpr (HIGH == 1) found = either(found, both(shifted<4 - j>(load(plane + 4 * LINE)), repeat_byte(0x10)));
    if constexpr (HIGH == 2)
        found = either(found, both(shifted<4 - j % 4 * 2>(load(plane + (4 + j / 4) * LINE)), repeat_byte(0x30)));
    return found;
}

// ---- Activations ----

// A CHUNK of up to MOST rows: what a product needs lies together.
template <int N>
struct Rounded {
    int8_t values[N][CHUNK];
    float scale[N];
    float sum[N];         // of the rounded activations, times the scale
    int32_t sums[N][2];   // of each half of the integers
};

inline void round_chunk(const float* given, int8_t* values, float& scale, float& sum, int32_t* sums) {
    constexpr int PARTS = CHUNK / LANES;
    Floats parts[PARTS];
    Ints most = repeat(0);
    for (int i = 0; i < PARTS; ++i) {
        parts[i] = floats_of(given + i * LANES);
        most = larger(most, bits_of_size(parts[i]));  // as integers what is not finite is largest
    }
    const float largest = float_of_bits(max_of(most)), inverse = largest > 0 ? 127.0f / largest : 0.0f;
    scale = largest / 127.0f + (largest - largest);  // not a number, if any is not finite
    Ints halves[2] = {repeat(0), repeat(0)};
    for (int i = 0; i < PARTS; ++i) {
        const Ints rounded = to_ints(times(parts[i], repeat(inverse)));
        store_bytes(values + i * LANES, rounded);
        halves[2 * i / PARTS] = plus(halves[2 * i / PARTS], rounded);
    }
    sums_of(halves[0], halves[1], sums);
    sum = scale * static_cast<float>(sums[0] + sums[1]);
}

template <int N>
void round_rows(const float* rows, int64_t columns, void* to) {
    auto* chunks = static_cast<Rounded<N>*>(to);
    for (int64_t c = 0; c < columns / CHUNK; ++c)
        for (int n = 0; n < N; ++n)
            round_chunk(rows + n * columns + c * CHUNK, chunks[c].values[n], chunks[c].scale[n], chunks[c].sum[n],
                        chunks[c].sums[n]);
}

// ---- Products ----

// Compute SIDE * LANES outputs, from lane `first` of a tile on, for N rows: to[n * stride].
template <class K, int N>
void multiply_lanes(const uint8_t* tile, int64_t columns, int64_t span, const Rounded<N>* chunk, int first, float* to,
                    int64_t stride) {
    constexpr int PARTS = CHUNK / K::GROUP, EACH = 8 / PARTS, RUN = std::min(LONGEST_RUN<K::high>, EACH);
    constexpr int CENTRE = K::high < 4 ? K::CENTRE : SIGNED_BYTES ? 0 : 128;
    const int64_t groups = span / K::GROUP;
    const int64_t own = K::SCALES == IN_8_BITS ? 2 * TILE * (1 + K::MINIMA) : 0;
    const int64_t header = (own + groups * K::STEP * (1 + K::MINIMA) + ALIGNED - 1) / ALIGNED * ALIGNED;
    Floats total[N][SIDE];
    for (int n = 0; n < N; ++n)
        for (int s = 0; s < SIDE; ++s) total[n][s] = zero();
    for (int64_t begin = 0; begin < columns; begin += span) {
        Floats d[SIDE], m[SIDE];
        for (int s = 0; s < SIDE && K::SCALES == IN_8_BITS; ++s) {
            d[s] = of_halves(tile + 2 * (first + s * LANES));
            m[s] = K::MINIMA ? of_halves(tile + 2 * (TILE + first + s * LANES)) : zero();
        }
        const uint8_t* scales = tile + own + (first << K::SCALES);
        const uint8_t* minima = scales + groups * K::STEP;
        const uint8_t* plane = tile + header;
        auto read = [&](const uint8_t* from, int s, Floats of_span, auto is_signed) {
            from += s * LANES << K::SCALES;
            if constexpr (K::SCALES == IN_8_BITS) return times(of_span, of_bytes<decltype(is_signed)::value>(from));
            else if constexpr (K::SCALES == IN_16_BITS) return of_halves(from);
            else return floats_of(reinterpret_cast<const float*>(from));
        };
        for (int64_t c = 0; c < span / CHUNK; ++c, ++chunk, plane += K::PLANE) {
            for (int64_t line = 0; line < K::PLANE; line += ALIGNED)
                _mm_prefetch(reinterpret_cast<const char*>(plane + AHEAD + line), _MM_HINT_T0);
            each<PARTS>([&](auto part) {
                constexpr int P = decltype(part)::value;
                Ints found[N][SIDE];
                for (int n = 0; n < N; ++n) {
                    const int32_t* sums = chunk->sums[n];
                    for (int s = 0; s < SIDE; ++s)
                        found[n][s] = repeat(-CENTRE * (PARTS == 1 ? sums[0] + sums[1] : sums[P]));
                }
                each<EACH / RUN>([&](auto number) {
                    Ints run[N][SIDE];
                    for (int n = 0; n < N; ++n)
                        for (int s = 0; s < SIDE; ++s) run[n][s] = VNNI ? found[n][s] : repeat(0);
                    each<RUN>([&](auto place) {
                        constexpr int j = P * EACH + decltype(number)::value * RUN + decltype(place)::value;
                        Ints weights[SIDE];
                        for (int s = 0; s < SIDE; ++s)
                            weights[s] = weights_of<K::high, j>(plane + 4 * (first + s * LANES));
                        for (int n = 0; n < N; ++n) {
                            const Ints by = repeat(four(chunk->values[n] + 4 * j));
                            for (int s = 0; s < SIDE; ++s) run[n][s] = dot<K::high>(run[n][s], weights[s], by);
                        }
                    });
                    for (int n = 0; n < N; ++n)
                        for (int s = 0; s < SIDE; ++s)
                            found[n][s] = VNNI ? run[n][s] : plus_pairs(found[n][s], run[n][s]);
                });
                Floats scale[SIDE];
                for (int s = 0; s < SIDE; ++s)
                    scale[s] = read(scales, s, d[s], std::integral_constant<bool, !K::MINIMA>{});
                for (int n = 0; n < N; ++n)
                    for (int s = 0; s < SIDE; ++s)
                        total[n][s] = times_plus(to_floats(found[n][s]), times(scale[s], repeat(chunk->scale[n])),
                                                 total[n][s]);
                scales += K::STEP;
            });
            if constexpr (K::MINIMA) {
                for (int s = 0; s < SIDE; ++s) {
                    const Floats minimum = read(minima, s, m[s], std::false_type{});
                    for (int n = 0; n < N; ++n)
                        total[n][s] = times_plus(minimum, repeat(chunk->sum[n]), total[n][s]);
                }
                minima += K::STEP;
            }
        }
        tile += header + span / CHUNK * K::PLANE;
    }
    for (int n = 0; n < N; ++n)
        for (int s = 0; s < SIDE; ++s) store(to + n * stride + s * LANES, total[n][s]);
}

// Compute the outputs of a tile for N rows. valid: how many of them there are.
template <class K, int N>
void multiply(const uint8_t* tile, int64_t columns, int64_t span, const void* chunks, float* to, int64_t stride,
              int64_t valid) {
    const auto* rounded = static_cast<const Rounded<N>*>(chunks);
    float last[N * TILE];  // a tile that ends beyond the outputs is written here first
    float* made = valid < TILE ? last : to;
    const int64_t step = valid < TILE ? TILE : stride;
    for (int first = 0; first < TILE; first += SIDE * LANES)
        multiply_lanes<K, N>(tile, columns, span, rounded, first, made + first, step);
    if (valid < TILE)
        for (int n = 0; n < N; ++n) std::memcpy(to + n * stride, last + n * TILE, valid * sizeof(float));
}

struct Work {
    void (*round)(const float*, int64_t, void*);
    void (*multiply)(const uint8_t*, int64_t, int64_t, const void*, float*, int64_t, int64_t);
};

template <class K, int... N>
void list(Work* works, std::integer_sequence<int, N...>) {
    ((works[N - 1] = {round_rows<N>, multiply<K, N>}), ...);
}

// Return how many of the next rows are multiplied together: one of a few numbers, since compiling each takes time.
int64_t together(int64_t rows) { return rows >= MOST ? MOST : std::min<int64_t>(rows, 4); }

// Return what rounds and multiplies so many rows, at that number less one; null for a kind that is not known.
const Work* works_of(const std::string& kind) {
    using Numbers = std::integer_sequence<int, 1, 2, 3, 4, MOST>;
    static const auto all = [] {
        std::map<std::string, std::array<Work, MOST>> made;
        auto add = [&](const char* name, auto kind) { list<decltype(kind)>(made[name].data(), Numbers{}); };
        add("Q4_0", Kind<0, 32, IN_16_BITS, false, 8>{});
        add("Q4_1", Kind<0, 32, IN_16_BITS, true, 0>{});
        add("Q5_0", Kind<1, 32, IN_16_BITS, false, 16>{});
        add("Q5_1", Kind<1, 32, IN_16_BITS, true, 0>{});
        add("Q8_0", Kind<4, 32, IN_16_BITS, false, 0>{});
        add("Q4_K", Kind<0, 32, IN_8_BITS, true, 0>{});
        add("Q5_K", Kind<1, 32, IN_8_BITS, true, 0>{});
        add("Q6_K", Kind<2, 16, IN_8_BITS, false, 32>{});
        add("int8", Kind<4, 32, IN_32_BITS, false, 0>{});
        return made;
    }();
    const auto found = all.find(kind);
    return found == all.end() ? nullptr : found->second.data();
}

int64_t bytes_of(int64_t rows, int64_t columns) {
    return rows * columns / CHUNK * static_cast<int64_t>(sizeof(Rounded<1>));
}

}  // namespace
