// TreeAttention, an operator of OpenVINO: it writes the keys and values of new tokens into the slots of a cache, in
// place, and attends from them over all slots that they see. Any mask will do, so that it serves trees, levels of a
// tree, prompts and sliding windows.
//
// It gets the addresses of the cache, of slots and of masks, not these themselves: their sizes change as a text grows,
// and OpenVINO takes longer to find out the shape of a result than it takes to compute it.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include <openvino/core/extension.hpp>
#include <openvino/core/op_extension.hpp>
#include <openvino/op/op.hpp>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include "attention.hpp"

namespace {

constexpr int64_t FEW = 64;  // new tokens of a row: of more, tasks of their queries keep all threads busy

enum Input { QUERIES_, KEYS_, VALUES_, ADDRESSES, SINKS };
enum Place { VIEW, CACHE_ROWS, NUMBER_BYTES, SLOT_NUMBERS };  // of what is first among the addresses, in 64 bits each

// Return memory of this thread for so many numbers, another for each purpose. It stays, since new memory
// takes longer to get than to fill, and begins with a cache line: registers read from two lines take twice as long.
enum Purpose { TASK, RESULTS };
template <Purpose>
float* memory_of(int64_t numbers) {
    constexpr size_t LINE = 64;
    static thread_local std::vector<float> memory;
    const size_t wanted = static_cast<size_t>(numbers) + LINE / sizeof(float);
    if (memory.size() < wanted) memory.resize(wanted);
    void* begin = memory.data();
    size_t space = memory.size() * sizeof(float);
    return static_cast<float*>(std::align(LINE, static_cast<size_t>(numbers) * sizeof(float), begin, space));
}

// Return the next multiple of a cache line's numbers.
int64_t whole_lines(int64_t numbers) { return (numbers + 15) / 16 * 16; }

// Write what is new, [rows, kv_heads, count, width], to its slots.
void write(const float* from, int64_t width, const Attention& a, const int64_t* slots, void* kept) {
    for (int64_t row = 0; row < a.rows; ++row)
        for (int64_t head = 0; head < a.kv_heads; ++head)
            for (int64_t token = 0; token < a.count; ++token, from += width) {
                const int64_t slot = slots[row * a.count + token];
                const int64_t place = (a.block(slot / SLOTS, row, head) + slot % SLOTS) * width;
                if (a.halves)
                    for (int64_t c = 0; c < width; ++c) static_cast<Half*>(kept)[place + c] = half_of(from[c]);
                else
                    std::memcpy(static_cast<float*>(kept) + place, from, static_cast<size_t>(width) * sizeof(float));
            }
}

// Where the parts begin that a few queries' slots are computed in, apart. Their number alone depends on the view.
int64_t beginning(int64_t part) { return part < 2 ? 128 * part : 256 * (part - 1); }

int64_t parts_of(const Attention& a) {
    int64_t parts = 1;
    while (a.count <= FEW && beginning(parts) < a.view) ++parts;
    return parts;
}

// Compute all of it, a task for each row, head of keys, group of queries and part of the slots.
void attend_all(const Attention& a) {
    const int64_t parts = parts_of(a), pairs = a.rows * a.kv_heads;
    const int64_t queries = a.queries(), padded = a.padded(), threads = tbb::this_task_arena::max_concurrency();
    const int64_t wanted = std::min(queries, (2 * threads + pairs * parts - 1) / (pairs * parts));
    const int64_t groups = std::max(wanted, (queries + QUERIES - 1) / QUERIES), most = (queries + groups - 1) / groups;
    const int64_t tiles = (a.width + padded + most) * SLOTS, mixed_size = whole_lines(most * padded);
    // Of each query and part: the largest score, the sum of the weights, and the weighted values.
    const int64_t one = whole_lines(2) + padded;
    float* found = parts > 1 ? memory_of<RESULTS>(pairs * queries * parts * one) : nullptr;

    auto finish = [&](int64_t row, int64_t head, int64_t query, const float* mixed, float sum) {
        const int64_t own = head * a.shared() + query % a.shared();
        float* to = a.made + ((row * a.count + query / a.shared()) * a.heads + own) * a.value_width;
        const float by = 1.0f / sum;
        for (int64_t c = 0; c < a.value_width; ++c) to[c] = mixed[c] * by;
    };
    auto run = [&](const tbb::blocked_range<int64_t>& range) {
        for (int64_t task = range.begin(); task < range.end(); ++task) {
            const int64_t part = task % parts, group = task / parts % groups, pair = task / parts / groups;
            const int64_t first = group * most, count = std::min(most, queries - first);
            if (count <= 0) continue;
            float* memory = memory_of<TASK>(tiles + mixed_size + most * (a.width + 2));
            float *mixed = memory + tiles, *scaled = mixed + mixed_size, *largest = scaled + most * a.width;
            State state{scaled, largest, largest + most, mixed};
            const int64_t row = pair / a.kv_heads, head = pair % a.kv_heads;
            const int64_t end = part + 1 < parts ? beginning(part + 1) : a.view;
            (a.halves ? attend<Half> : attend<float>)(a, row, head, first, count, beginning(part), end, memory, state);
            for (int64_t m = 0; m < count; ++m) {
                if (parts == 1) {
                    finish(row, head, first + m, state.mixed + m * padded, state.sum[m]);
                    continue;
                }
                float* to = found + ((pair * queries + first + m) * parts + part) * one;
                to[0] = state.largest[m], to[1] = state.sum[m];
                std::memcpy(to + one - padded, state.mixed + m * padded, static_cast<size_t>(padded) * sizeof(float));
            }
        }
    };
    // While it waits, this thread must not begin another operator: its memory is in use.
    tbb::this_task_arena::isolate(
        [&] { tbb::parallel_for(tbb::blocked_range<int64_t>(0, pairs * groups * parts), run); });
    if (parts == 1) return;
    float* mixed = memory_of<TASK>(padded);
    for (int64_t query = 0; query < pairs * queries; ++query) {
        const float* from = found + query * parts * one;
        float largest = LOWEST, sum = 0;
        for (int64_t part = 0; part < parts; ++part) largest = std::max(largest, from[part * one]);
        std::fill_n(mixed, padded, 0.0f);
        for (int64_t part = 0; part < parts; ++part, from += one) {
            if (from[1] == 0) continue;  // it sees nothing of this part
            const float less = first_of(exp_of(repeat(from[0] - largest)));
            sum += from[1] * less;
            for (int64_t c = 0; c < padded; ++c) mixed[c] += from[one - padded + c] * less;
        }
        const int64_t pair = query / queries;
        finish(pair / a.kv_heads, pair % a.kv_heads, query % queries, mixed, sum);
    }
}

class TreeAttention : public ov::op::Op {
public:
    OPENVINO_OP("TreeAttention", "eagle_fsd");

    TreeAttention() = default;

    TreeAttention(const ov::OutputVector& inputs, double scale, double softcap, int64_t mask, int64_t keys)
        : Op(inputs), scale_(scale), softcap_(softcap), mask_(mask), keys_(keys) {
        constructor_validate_and_infer_types();
    }

    void validate_and_infer_types() override {
        const auto& queries = get_input_partial_shape(QUERIES_);
        const auto& values = get_input_partial_shape(VALUES_);
        set_output_type(0, ov::element::f32, ov::PartialShape{queries[0], queries[2], queries[1], values[3]});
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        return std::make_shared<TreeAttention>(inputs, scale_, softcap_, mask_, keys_);
    }

    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visitor.on_attribute("scale", scale_);
        visitor.on_attribute("softcap", softcap_);
        visitor.on_attribute("mask", mask_);
        visitor.on_attribute("keys", keys_);
        return true;
    }

    bool has_evaluate() const override { return true; }

    bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        auto size = [&](Input input, size_t axis) { return static_cast<int64_t>(inputs[input].get_shape()[axis]); };
        auto floats = [&](Input input) { return static_cast<const float*>(inputs[input].data()); };
        Attention a{};
        a.rows = size(QUERIES_, 0), a.heads = size(QUERIES_, 1), a.count = size(QUERIES_, 2), a.width = size(QUERIES_, 3);
        a.kv_heads = size(KEYS_, 1), a.value_width = size(VALUES_, 3);
        auto at = [&](int64_t place) {
            int64_t found;
            std::memcpy(&found, static_cast<const uint8_t*>(inputs[ADDRESSES].data()) + 8 * place, 8);
            return found;
        };
        a.view = at(VIEW), a.cache_rows = at(CACHE_ROWS), a.halves = at(NUMBER_BYTES) == 2;
        a.keys = reinterpret_cast<void*>(at(keys_)), a.values = reinterpret_cast<void*>(at(keys_ + 1));
        a.visible = reinterpret_cast<const uint8_t*>(at(mask_));
        a.scale = static_cast<float>(scale_), a.softcap = static_cast<float>(softcap_);
        outputs[0].set_shape({inputs[QUERIES_].get_shape()[0], inputs[QUERIES_].get_shape()[2],
                              inputs[QUERIES_].get_shape()[1], inputs[VALUES_].get_shape()[3]});
        a.q = floats(QUERIES_), a.sinks = inputs[SINKS].get_size() ? floats(SINKS) : nullptr;
        a.made = outputs[0].data<float>();
        const auto* slots = reinterpret_cast<const int64_t*>(at(SLOT_NUMBERS));
        write(floats(KEYS_), a.width, a, slots, a.keys);
        write(floats(VALUES_), a.value_width, a, slots, a.values);
        if (a.rows * a.count) attend_all(a);
        return true;
    }

private:
    double scale_ = 1, softcap_ = 0;
    int64_t mask_ = 0, keys_ = 0;  // the places of their addresses; those of the values come after those of the keys
};

}  // namespace

ov::Extension::Ptr tree_attention() { return std::make_shared<ov::OpExtension<TreeAttention>>(); }
