// Attention of new tokens over a cache in blocks of slots, under any mask: what tree_attention.cpp runs.
//
// A task is a few queries of one row that share a head of keys. For each block of slots it turns the keys, so that a
// register holds a number of LANES slots, multiplies them with GROUP queries at a time, and adds what the weights pick
// of the values, with a running maximum as in FlashAttention (Dao et al. 2022, algorithm 1). A query's result does not
// depend on the queries beside it, nor on which threads there are: the same operations run in the same order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "registers.hpp"

namespace {

constexpr int SLOTS = 64, GROUP = 6, WIDE = LANES == 16 ? 4 : 2;  // slots of a block; a product's registers: GROUP x WIDE
constexpr int64_t QUERIES = 48;  // the most of a task
constexpr float LOWEST = std::numeric_limits<float>::lowest();

struct Attention {
    int64_t rows, heads, kv_heads, count, width, value_width;  // of queries, of keys, new tokens, sizes of heads
    int64_t cache_rows, view;                                  // rows and slots of the cache
    float scale, softcap;                                      // softcap 0: none
    const float *q, *sinks;                                    // [rows, heads, count, width]; [heads] or null
    void *keys, *values;                                       // [blocks, cache_rows, kv_heads, SLOTS, ...]
    bool halves;                                               // whether these are in 16 bits
    const uint8_t* visible;                                    // [rows, count, view]
    float* made;                                               // [rows, count, heads, value_width]

    int64_t shared() const { return heads / kv_heads; }
    int64_t queries() const { return count * shared(); }  // that share a head of keys: token by token
    int64_t padded() const { return (value_width + LANES - 1) / LANES * LANES; }
    int64_t block(int64_t number, int64_t row, int64_t head) const {
        return ((number * cache_rows + row) * kv_heads + head) * SLOTS;
    }
};

// Turn up to LANES columns of the first `slots` rows of SLOTS: to[column][slot].
template <class Number>
inline void turn(const Number* from, int64_t width, int64_t columns, int64_t slots, float* to) {
    if (columns == LANES) {
        for (int64_t slot = 0; slot < slots; slot += LANES) turn_square(from + slot * width, width, to + slot, SLOTS);
    } else {
        for (int64_t c = 0; c < columns; ++c)
            for (int64_t slot = 0; slot < slots; ++slot) to[c * SLOTS + slot] = float_of(from[slot * width + c]);
    }
}

// Add to N rows of `made` the N rows of `by` [N, depth] times the matrix `with` [depth, WIDE * LANES columns of it].
template <int N, int W>
inline void add_product(const float* by, int64_t by_stride, const float* with, int64_t with_stride, int64_t depth,
                        float* made, int64_t made_stride) {
    Floats sums[N][W];
    for (int n = 0; n < N; ++n)
        for (int w = 0; w < W; ++w) sums[n][w] = floats_of(made + n * made_stride + w * LANES);
    for (int64_t d = 0; d < depth; ++d) {
        Floats column[W];
        for (int w = 0; w < W; ++w) column[w] = floats_of(with + d * with_stride + w * LANES);
        for (int n = 0; n < N; ++n) {
            const Floats one = repeat(by[n * by_stride + d]);
            for (int w = 0; w < W; ++w) sums[n][w] = times_plus(one, column[w], sums[n][w]);
        }
    }
    for (int n = 0; n < N; ++n)
        for (int w = 0; w < W; ++w) store(made + n * made_stride + w * LANES, sums[n][w]);
}

using Adder = void (*)(const float*, int64_t, const float*, int64_t, int64_t, float*, int64_t);

template <int W>
Adder adder_of(int64_t queries) {
    static constexpr Adder all[GROUP] = {add_product<1, W>, add_product<2, W>, add_product<3, W>,
                                         add_product<4, W>, add_product<5, W>, add_product<6, W>};
    return all[queries - 1];
}

// Add to made [queries, columns] the product of by [queries, depth] and with [depth, columns].
inline void add_products(const float* by, int64_t by_stride, const float* with, int64_t columns, int64_t with_stride,
                         int64_t depth, float* made, int64_t made_stride, int64_t queries) {
    for (int64_t q = 0; q < queries; q += GROUP) {
        const int64_t n = std::min<int64_t>(GROUP, queries - q);
        int64_t c = 0;
        for (; c + WIDE * LANES <= columns; c += WIDE * LANES)
            adder_of<WIDE>(n)(by + q * by_stride, by_stride, with + c, with_stride, depth, made + q * made_stride + c,
                              made_stride);
        for (; c < columns; c += LANES)
            adder_of<1>(n)(by + q * by_stride, by_stride, with + c, with_stride, depth, made + q * made_stride + c,
                           made_stride);
    }
}

// Fetch so many numbers, that are read soon, into a cache.
template <class Number>
inline void fetch(const Number* from, int64_t numbers) {
    constexpr int64_t LINE = 64 / sizeof(Number);
    for (int64_t i = 0; i < numbers; i += LINE) _mm_prefetch(reinterpret_cast<const char*>(from + i), _MM_HINT_T0);
}

// Return rows as whole registers of floats: themselves, or copies in `memory`.
inline const float* whole(const float* from, int64_t width, int64_t rows, int64_t padded, float* memory) {
    if (padded == width) return from;
    for (int64_t row = 0; row < rows; ++row) std::memcpy(memory + row * padded, from + row * width, width * sizeof(float));
    return memory;
}
inline const float* whole(const Half* from, int64_t width, int64_t rows, int64_t padded, float* memory) {
    for (int64_t row = 0; row < rows; ++row, from += width) {
        int64_t c = 0;
        for (; c + LANES <= width; c += LANES) store(memory + row * padded + c, floats_of(from + c));
        for (; c < width; ++c) memory[row * padded + c] = float_of(from[c]);
    }
    return memory;
}

// The queries of a task while it runs: their scaled numbers, and for each the largest score, the sum of the weights, and
// the weighted sum of the values so far.
struct State {
    float *queries, *largest, *sum, *mixed;
};

// Turn scores [SLOTS] of a query into weights, and add them up. seen: which slots it sees.
inline void weigh(float* scores, uint64_t seen, float softcap, float& largest, float& sum, float* mixed,
                  int64_t columns) {
    constexpr int PARTS = SLOTS / LANES;
    Floats parts[PARTS], most = repeat(largest);
    for (int i = 0; i < PARTS; ++i) {
        parts[i] = floats_of(scores + i * LANES);
        if (softcap > 0) parts[i] = times(repeat(softcap), tanh_of(times(parts[i], repeat(1 / softcap))));
        parts[i] = where(seen >> (i * LANES), parts[i], repeat(LOWEST));
        most = larger(most, parts[i]);
    }
    const float now = max_of(most);
    if (now > largest) {
        const float less = first_of(exp_of(repeat(largest - now)));
        for (int64_t c = 0; c < columns; c += LANES) store(mixed + c, times(floats_of(mixed + c), repeat(less)));
        sum *= less;
        largest = now;
    }
    Floats total = zero();
    for (int i = 0; i < PARTS; ++i) {
        const Floats weights = where(seen >> (i * LANES), exp_of(less_by(parts[i], repeat(largest))), zero());
        store(scores + i * LANES, weights);
        total = plus(total, weights);
    }
    sum += sum_of(total);
}

// Attend from queries `first` on over the slots of a part. state: has room for all of them; made here.
template <class Number>
inline void attend(const Attention& a, int64_t row, int64_t head, int64_t first, int64_t queries, int64_t begin,
                   int64_t end, float* memory, const State& state) {
    const int64_t shared = a.shared(), padded = a.padded();
    float* keys = memory;                       // [width, SLOTS]
    float* values = keys + a.width * SLOTS;     // [SLOTS, padded], where rows are not registers of floats
    float* scores = values + SLOTS * padded;    // [queries, SLOTS]
    const auto* kept_keys = static_cast<const Number*>(a.keys);
    const auto* kept_values = static_cast<const Number*>(a.values);
    uint64_t seen[QUERIES];
    for (int64_t m = 0; m < queries; ++m) {
        const int64_t token = (first + m) / shared, own = head * shared + (first + m) % shared;
        const float* from = a.q + ((row * a.heads + own) * a.count + token) * a.width;
        for (int64_t d = 0; d < a.width; ++d) state.queries[m * a.width + d] = from[d] * a.scale;
        const bool sink = a.sinks != nullptr && begin == 0;
        state.largest[m] = sink ? a.sinks[own] : LOWEST;
        state.sum[m] = sink ? 1.0f : 0.0f;
        std::fill_n(state.mixed + m * padded, padded, 0.0f);
    }
    for (int64_t at = begin; at < end; at += SLOTS) {
        uint64_t any = 0;
        for (int64_t m = 0; m < queries; ++m) {
            if (m == 0 || (first + m) % shared == 0)
                seen[m] = bits_of(a.visible + (row * a.count + (first + m) / shared) * a.view + at);
            else
                seen[m] = seen[m - 1];
            any |= seen[m];
        }
        if (!any) continue;
        const int64_t last = 64 - __builtin_clzll(any);  // of the slots that any query sees
        const int64_t slots = (last + LANES - 1) / LANES * LANES;
        const int64_t block = a.block(at / SLOTS, row, head);
        fetch(kept_values + block * a.value_width, SLOTS * a.value_width);
        for (int64_t c = 0; c < a.width; c += LANES)
            turn(kept_keys + block * a.width + c, a.width, std::min<int64_t>(LANES, a.width - c), slots,
                 keys + c * SLOTS);
        std::fill_n(scores, queries * SLOTS, 0.0f);
        add_products(state.queries, a.width, keys, slots, SLOTS, a.width, scores, SLOTS, queries);
        for (int64_t m = 0; m < queries; ++m) {
            if (seen[m])
                weigh(scores + m * SLOTS, seen[m], a.softcap, state.largest[m], state.sum[m], state.mixed + m * padded,
                      padded);
            else
                std::fill_n(scores + m * SLOTS, SLOTS, 0.0f);
        }
        if (at + SLOTS < end) fetch(kept_keys + a.block(at / SLOTS + 1, row, head) * a.width, SLOTS * a.width);
        const float* from = whole(kept_values + block * a.value_width, a.value_width, last, padded, values);
        add_products(scores, SLOTS, from, padded, padded, last, state.mixed, padded, queries);
    }
}

}  // namespace
