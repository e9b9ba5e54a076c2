// TileProduct, an operator of OpenVINO: float rows times weights of few bits, kept as in a .gguf file; see tiles.hpp.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <openvino/core/extension.hpp>
#include <openvino/core/op_extension.hpp>
#include <openvino/op/op.hpp>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include "tiles.hpp"
#include "weights.hpp"

namespace {

class TileProduct : public ov::op::Op {
public:
    OPENVINO_OP("TileProduct", "eagle_fsd");

    TileProduct() = default;

    TileProduct(const ov::OutputVector& inputs, std::string kind, std::vector<int64_t> widths, int64_t span)
        : Op(inputs), kind_(std::move(kind)), widths_(std::move(widths)), span_(span) {
        constructor_validate_and_infer_types();
    }

    void validate_and_infer_types() override {
        NODE_VALIDATION_CHECK(this, works_of(kind_) != nullptr, "unknown kind of blocks: ", kind_);
        auto shape = get_input_partial_shape(0);
        for (size_t part = 0; part < widths_.size(); ++part) {
            shape[shape.size() - 1] = widths_[part];
            set_output_type(part, ov::element::f32, shape);
        }
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        return std::make_shared<TileProduct>(inputs, kind_, widths_, span_);
    }

    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visitor.on_attribute("kind", kind_);
        visitor.on_attribute("widths", widths_);
        visitor.on_attribute("span", span_);
        return true;
    }

    bool has_evaluate() const override { return true; }

    bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        auto shape = inputs[0].get_shape();
        const int64_t columns = static_cast<int64_t>(shape.back());
        const int64_t rows = columns ? static_cast<int64_t>(inputs[0].get_size()) / columns : 0;
        std::vector<Part> parts;
        int64_t tiles = 0;
        for (size_t part = 0; part < widths_.size(); ++part) {
            shape.back() = static_cast<size_t>(widths_[part]);
            outputs[part].set_shape(shape);
            parts.push_back({tiles, widths_[part], outputs[part].data<float>()});
            tiles += (widths_[part] + TILE - 1) / TILE;
        }
        const float* given = inputs[0].data<const float>();
        const auto* weights = weights_.at(static_cast<const uint8_t*>(inputs[1].data()), inputs[1].get_byte_size());
        const int64_t bytes = static_cast<int64_t>(inputs[1].get_byte_size()) / std::max<int64_t>(tiles, 1);
        const Work* works = works_of(kind_);
        static thread_local std::vector<uint8_t> memory;
        memory.resize(static_cast<size_t>(bytes_of(rows, columns)));
        uint8_t* rounded = memory.data();
        auto for_rows = [rows](auto work) {
            for (int64_t row = 0; row < rows;) {
                const int64_t count = together(rows - row);
                work(row, count);
                row += count;
            }
        };
        for_rows([&](int64_t row, int64_t count) {
            works[count - 1].round(given + row * columns, columns, rounded + bytes_of(row, columns));
        });
        auto multiply = [&](const tbb::blocked_range<int64_t>& range) {
            for (int64_t tile = range.begin(); tile < range.end(); ++tile) {
                auto part = parts.rbegin();
                while (part->first > tile) ++part;
                const int64_t width = part->width, begin = (tile - part->first) * TILE;
                for_rows([&](int64_t row, int64_t count) {
                    works[count - 1].multiply(weights + tile * bytes, columns, span_, rounded + bytes_of(row, columns),
                                              part->made + row * width + begin, width,
                                              std::min<int64_t>(TILE, width - begin));
                });
            }
        };
        // Long ranges begin seldom, where nothing was fetched ahead; a thread that is late leaves some to others.
        const int64_t grain = std::max<int64_t>(2, tiles / (4 * tbb::this_task_arena::max_concurrency()));
        // While it waits, this thread must not begin another product: its memory is in use.
        tbb::this_task_arena::isolate(
            [&] { tbb::parallel_for(tbb::blocked_range<int64_t>(0, tiles, grain), multiply); });
        return true;
    }

private:
    // The outputs of one weight among those whose tiles follow each other.
    struct Part {
        int64_t first, width;  // its first tile
        float* made;
    };

    std::string kind_;
    std::vector<int64_t> widths_;
    int64_t span_ = 0;
    mutable Weights weights_;
};

}  // namespace

ov::Extension::Ptr tree_attention();  // of tree_attention.cpp

OPENVINO_CREATE_EXTENSIONS(
    std::vector<ov::Extension::Ptr>({std::make_shared<ov::OpExtension<TileProduct>>(), tree_attention()}));
