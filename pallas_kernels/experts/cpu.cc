// A mixture of experts: each row times the weights of its own experts, each expert's weights read once.
//
// The rows of an expert are gathered and multiplied as `linear` and `swiglu` multiply rows, whose bits do not depend on the
// rows beside them; a row's results are added in the order of its scores. So neither do the bits of the sum.
#include <memory>

#include "../linear/weight_format.h"
#include "../native/handler.h"
#include "../native/lanes.h"
#include "routing.h"

namespace jaxspec {
namespace {

struct GatheredTag;
struct HiddenTag;
struct ResultTag;
struct ExpertCodesTag;
struct ExpertGateTag;

// Numbers that a thread keeps between calls; more are taken and given back.
constexpr int64_t kMostKept = int64_t{1} << 22;

template <class Tag>
class Room {
 public:
  explicit Room(int64_t count) {
    if (count <= kMostKept) {
      values_ = scratch<Tag>(count);
    } else {
      own_.reset(new float[count]);
      values_ = own_.get();
    }
  }
  float* get() const { return values_; }

 private:
  std::unique_ptr<float[]> own_;
  float* values_;
};

// The weights of all experts of a device: `outputs` rows each.
struct ExpertWeights {
  const WeightFormat* format;
  Matrix all;
  int64_t outputs;
};

// The weights in a buffer, in the format of that name; of no format if they do not fit it.
ExpertWeights weights_of(std::string_view name, const ffi::AnyBuffer& weight, int64_t outputs, int64_t inputs) {
  const WeightFormat* format = find_format(name);
  const int64_t rows = weight.dimensions()[0] * outputs;
  if (!format || !format->fits(rows, inputs, static_cast<int64_t>(weight.size_bytes()))) return {nullptr, {}, outputs};
  return {format, {bytes(weight), rows, inputs, format->row_bytes(inputs)}, outputs};
}

// Rows times their experts' weights: calls `work(multiply, expert, first, count, unit)` for chunks of `columns` columns,
// where `multiply(first, count, y, y_stride)` multiplies the expert's rows by its outputs from `first` on.
template <class Work>
void for_chunks(ThreadPool& pool, int64_t threads, const Routing& routing, const ExpertWeights& w, const float* x,
                int64_t columns, const Work& work) {
  const WeightFormat& format = *w.format;
  const int64_t active = static_cast<int64_t>(routing.experts.size()), inputs = w.all.inputs;
  // Numbers of a row as the products take it.
  const int64_t size = format.planes ? format.quantised_size(inputs) : inputs;
  const Room<ExpertCodesTag> room(format.planes ? routing.pairs() * size + kBeyond : 0);
  const float* prepared = format.planes ? room.get() : x;
  if (float* codes = room.get(); format.planes) {
    const int64_t worthwhile = routing.pairs() * inputs < 32 * 1024 ? 1 : threads;
    parallel(pool, worthwhile, active, [&](int64_t i) {
      const Routing::Expert& expert = routing.experts[i];
      quantise(format, x + expert.first * inputs, expert.count, inputs, 0, 1, codes + expert.first * size);
    });
  }
  const int64_t unit = format.unit_outputs(columns * active, w.outputs / columns * w.all.row_bytes, threads);
  const int64_t chunks = (columns + unit - 1) / unit;
  parallel(pool, threads, active * chunks, [&](int64_t i) {
    const Routing::Expert& expert = routing.experts[i / chunks];
    const int64_t first = i % chunks * unit;
    work(
        [&](int64_t from, int64_t count, float* y, int64_t y_stride) {
          format.multiply(prepared + expert.first * size, expert.count, w.all, expert.index * w.outputs + from, count, y,
                          y_stride);
        },
        expert, first, std::min(unit, columns - first), unit);
  });
}

// y[r][c] += bias[c] for rows of a stride.
void add_bias(const float* bias, int64_t rows, int64_t count, float* y, int64_t y_stride) {
  for (int64_t r = 0; r < rows; r++) add_scaled(bias, 1.0f, count, y + r * y_stride);
}

// y = gelu(gate) * up, by tanh: (1 + tanh(a)) / 2 = 1 / (1 + exp(-2 a)), where a = sqrt(2 / pi) (g + 0.044715 g^3).
void activate_gelu(const float* gate, const float* up, int64_t count, float* y) {
  const Lanes one = set(1.0f), linear = set(-1.5957691216f), cubic = set(-0.0713548163f);
  for (int64_t c = 0; c < count; c += kLanes) {
    const int n = static_cast<int>(std::min<int64_t>(kLanes, count - c));
    const Lanes g = load(gate + c, n), u = load(up + c, n);
    store(y + c, g / (one + exp(g * (linear + cubic * (g * g)))) * u, n);
  }
}

// What the handlers have in common: the weights of the experts that are here, their biases and their activation.
struct Experts {
  ffi::AnyBuffer gate_up, down;
  Floats gate_up_bias, down_bias;
  std::string_view gate_up_format, down_format;
  int64_t columns;
  float limit, alpha;
};

// Rows `x` through the experts that they are routed to; `biased` experts have biases, if any has.
ffi::Error mix(ThreadPool& pool, const Floats& x, const Routing& routing, const Experts& own, int64_t biased,
               int64_t per_token, int64_t threads, float* y) {
  const int64_t rows = x.dimensions()[0], width = x.dimensions()[1], columns = own.columns;
  const int64_t local = own.gate_up.dimensions()[0];
  const ExpertWeights up = weights_of(own.gate_up_format, own.gate_up, 2 * columns, width);
  const ExpertWeights out = weights_of(own.down_format, own.down, width, columns);
  if (!up.format || !out.format || own.down.dimensions()[0] != local)
    return invalid("experts: the weights are none of the format " + std::string(own.gate_up_format) + " or " +
                   std::string(own.down_format));
  const auto bias_of = [](const Floats& bias) { return bias.element_count() ? bias.typed_data() : nullptr; };
  const float *up_bias = bias_of(own.gate_up_bias), *out_bias = bias_of(own.down_bias);
  if ((up_bias && static_cast<int64_t>(own.gate_up_bias.element_count()) != biased * 2 * columns) ||
      (out_bias && static_cast<int64_t>(own.down_bias.element_count()) != biased * width))
    return invalid("experts: the biases do not fit the weights");
  const float limit = own.limit, alpha = own.alpha;
  const int64_t pairs = routing.pairs(), choices = static_cast<int64_t>(routing.pair.size());
  const Room<GatheredTag> gathered(pairs * width);
  const Room<HiddenTag> hidden(pairs * columns);
  const Room<ResultTag> result(pairs * width);
  float *inputs = gathered.get(), *h = hidden.get(), *each = result.get();
  for (int64_t p = 0; p < pairs; p++)
    std::copy_n(x.typed_data() + routing.row[p] * width, width, inputs + p * width);

  for_chunks(pool, threads, routing, up, inputs, columns,
             [=](auto multiply, const Routing::Expert& expert, int64_t from, int64_t n, int64_t unit) {
               float* gate = scratch<ExpertGateTag>(2 * expert.count * unit);
               float* linear = gate + expert.count * unit;
               multiply(from, n, gate, unit);
               multiply(columns + from, n, linear, unit);
               if (up_bias) {
                 const float* bias = up_bias + expert.bias * 2 * columns + from;
                 add_bias(bias, expert.count, n, gate, unit);
                 add_bias(bias + columns, expert.count, n, linear, unit);
               }
               for (int64_t r = 0; r < expert.count; r++) {
                 float* out = h + (expert.first + r) * columns + from;
                 if (limit > 0) {
                   activate_clamped(gate + r * unit, linear + r * unit, n, limit, alpha, out);
                 } else if (limit < 0) {
                   activate_gelu(gate + r * unit, linear + r * unit, n, out);
                 } else {
                   activate(gate + r * unit, linear + r * unit, n, out);
                 }
               }
             });
  for_chunks(pool, threads, routing, out, h, width,
             [=](auto multiply, const Routing::Expert& expert, int64_t from, int64_t n, int64_t) {
               multiply(from, n, each + expert.first * width + from, width);
               if (out_bias)
                 add_bias(out_bias + expert.bias * width + from, expert.count, n, each + expert.first * width + from,
                          width);
             });
  for (int64_t t = 0; t < rows; t++) {
    float* row = y + t * width;
    clear(row, width);
    for (int64_t j = t * per_token; j < std::min((t + 1) * per_token, choices); j++) {
      if (routing.pair[j] < 0) continue;
      add_scaled(each + routing.pair[j] * width, routing.score[j], width, row);
    }
  }
  return ffi::Error::Success();
}

ffi::Error run_experts(ffi::ThreadPool pool, Floats x, Floats logits, ffi::AnyBuffer gate_up, ffi::AnyBuffer down,
                       Floats gate_up_bias, Floats down_bias, Scalar first, Scalar active_rows,
                       ffi::ResultBuffer<ffi::F32> y, std::string_view gate_up_format, std::string_view down_format,
                       int64_t columns, int64_t per_token, std::string_view scores, float limit, float alpha,
                       int64_t threads) {
  const int64_t rows = x.dimensions()[0], width = x.dimensions()[1], experts = logits.dimensions()[1];
  if (rows == 0 || width == 0) return ffi::Error::Success();
  if (logits.dimensions()[0] != rows || columns < 1 || per_token < 1 || per_token > experts)
    return invalid("experts: the operands do not fit together");
  const Experts own{gate_up, down, gate_up_bias, down_bias, gate_up_format, down_format, columns, limit, alpha};
  const int64_t local = gate_up.dimensions()[0];
  const Routing routing = route(logits.typed_data(), count_active_rows(active_rows, rows), experts, per_token,
                                scores_named(scores), *first.typed_data(), local);
  XlaThreads workers(pool);
  return mix(workers, x, routing, own, local, per_token, threads, y->typed_data());
}

// The same in two steps: first the choice, then rows through experts that lie anywhere in a larger array.
ffi::Error run_choose(Floats logits, Scalar active_rows, ffi::ResultBuffer<ffi::S32> choice,
                      ffi::ResultBuffer<ffi::F32> score, int64_t per_token, std::string_view scores) {
  const int64_t rows = logits.dimensions()[0], experts = logits.dimensions()[1];
  if (per_token < 1 || per_token > experts) return invalid("choose_experts: the operands do not fit together");
  const int64_t count = count_active_rows(active_rows, rows);
  std::vector<float> weight(experts);
  for (int64_t t = 0; t < count; t++)
    choose_experts(logits.typed_data() + t * experts, experts, per_token, scores_named(scores), weight.data(),
                   choice->typed_data() + t * per_token, score->typed_data() + t * per_token);
  std::fill_n(choice->typed_data() + count * per_token, (rows - count) * per_token, -1);
  clear(score->typed_data() + count * per_token, (rows - count) * per_token);
  return ffi::Error::Success();
}

ffi::Error run_chosen(ffi::ThreadPool pool, Floats x, Ints choice, Floats score, Ints places, ffi::AnyBuffer gate_up,
                      ffi::AnyBuffer down, Floats gate_up_bias, Floats down_bias, ffi::ResultBuffer<ffi::F32> y,
                      std::string_view gate_up_format, std::string_view down_format, int64_t columns, float limit,
                      float alpha, int64_t threads) {
  const int64_t rows = x.dimensions()[0], width = x.dimensions()[1], experts = places.dimensions()[0];
  if (rows == 0 || width == 0) return ffi::Error::Success();
  const int64_t per_token = choice.dimensions()[1];
  if (choice.dimensions()[0] != rows || score.element_count() != choice.element_count() || columns < 1 || per_token < 1)
    return invalid("chosen_experts: the operands do not fit together");
  const Experts own{gate_up, down, gate_up_bias, down_bias, gate_up_format, down_format, columns, limit, alpha};
  const Routing routing = route_chosen(choice.typed_data(), score.typed_data(), rows, per_token, places.typed_data(),
                                       experts, gate_up.dimensions()[0]);
  XlaThreads workers(pool);
  return mix(workers, x, routing, own, experts, per_token, threads, y->typed_data());
}

}  // namespace
}  // namespace jaxspec

JAXSPEC_HANDLER(jaxspec_experts, jaxspec::run_experts,
                xla::ffi::Ffi::Bind()
                    .Ctx<xla::ffi::ThreadPool>()
                    .Arg<jaxspec::Floats>()
                    .Arg<jaxspec::Floats>()
                    .Arg<xla::ffi::AnyBuffer>()
                    .Arg<xla::ffi::AnyBuffer>()
                    .Arg<jaxspec::Floats>()
                    .Arg<jaxspec::Floats>()
                    .Arg<jaxspec::Scalar>()
                    .Arg<jaxspec::Scalar>()
                    .Ret<jaxspec::Floats>()
                    .Attr<std::string_view>("gate_up_format")
                    .Attr<std::string_view>("down_format")
                    .Attr<int64_t>("columns")
                    .Attr<int64_t>("per_token")
                    .Attr<std::string_view>("scores")
                    .Attr<float>("limit")
                    .Attr<float>("alpha")
                    .Attr<int64_t>("threads"));

JAXSPEC_HANDLER(jaxspec_choose_experts, jaxspec::run_choose,
                xla::ffi::Ffi::Bind()
                    .Arg<jaxspec::Floats>()
                    .Arg<jaxspec::Scalar>()
                    .Ret<jaxspec::Ints>()
                    .Ret<jaxspec::Floats>()
                    .Attr<int64_t>("per_token")
                    .Attr<std::string_view>("scores"));

JAXSPEC_HANDLER(jaxspec_chosen_experts, jaxspec::run_chosen,
                xla::ffi::Ffi::Bind()
                    .Ctx<xla::ffi::ThreadPool>()
                    .Arg<jaxspec::Floats>()
                    .Arg<jaxspec::Ints>()
                    .Arg<jaxspec::Floats>()
                    .Arg<jaxspec::Ints>()
                    .Arg<xla::ffi::AnyBuffer>()
                    .Arg<xla::ffi::AnyBuffer>()
                    .Arg<jaxspec::Floats>()
                    .Arg<jaxspec::Floats>()
                    .Ret<jaxspec::Floats>()
                    .Attr<std::string_view>("gate_up_format")
                    .Attr<std::string_view>("down_format")
                    .Attr<int64_t>("columns")
                    .Attr<float>("limit")
                    .Attr<float>("alpha")
                    .Attr<int64_t>("threads"));
