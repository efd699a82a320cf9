#include "weight_format.h"

#include "packed_product.h"

namespace jaxspec {

extern const FormatList kNumbers, kGgufBlocks, kMoreGgufBlocks, kGroupBlocks, kPackedGguf8, kPackedGguf16, kPackedK8,
    kPackedK16, kPackedGroups8, kPackedGroups16;

const WeightFormat* find_format(std::string_view name) {
  for (const FormatList* list : {&kNumbers, &kGgufBlocks, &kMoreGgufBlocks, &kGroupBlocks, &kPackedGguf8, &kPackedGguf16,
                                 &kPackedK8, &kPackedK16, &kPackedGroups8, &kPackedGroups16})
    for (const WeightFormat& format : *list)
      if (format.name == name) return &format;
  return nullptr;
}

void quantise(const WeightFormat& format, const float* x, int64_t rows, int64_t inputs, int64_t part, int64_t parts,
              float* out) {
  const int64_t units = inputs / kUnit, from = units * part / parts, to = units * (part + 1) / parts;
  const auto quantise_unit = format.planes == 1 ? detail::quantise_unit<1> : detail::quantise_unit<2>;
  for (int64_t first = 0, count = 0; first < rows; first += count) {
    count = std::min(tile_rows(rows, format.planes, format.parts), rows - first);
    const detail::Quantised tile(out + first * format.quantised_size(inputs), count, units, format.planes);
    for (int64_t unit = from; unit < to; unit++)
      for (int64_t r = 0; r < count; r++)
        quantise_unit(format, x + (first + r) * inputs + unit * kUnit, unit, r, count, tile);
  }
}

void activate(const float* gate, const float* up, int64_t count, float* y) {
  for (int64_t c = 0; c < count; c += kLanes) {
    const int n = static_cast<int>(std::min<int64_t>(kLanes, count - c));
    Lanes g = load(gate + c, n), u = load(up + c, n);
    store(y + c, g / (set(1.0f) + exp(zero() - g)) * u, n);
  }
}

void activate_clamped(const float* gate, const float* up, int64_t count, float limit, float alpha, float* y) {
  const Lanes most = set(limit), one = set(1.0f);
  for (int64_t c = 0; c < count; c += kLanes) {
    const int n = static_cast<int>(std::min<int64_t>(kLanes, count - c));
    const Lanes g = min(most, load(gate + c, n)), u = max(set(-limit), min(most, load(up + c, n)));
    store(y + c, (u + one) * (g / (one + exp(zero() - g * set(alpha)))), n);
  }
}

void add_scaled(const float* x, float scale, int64_t count, float* y) {
  for (int64_t i = 0; i < count; i++) y[i] += scale * x[i];
}

namespace {
struct QuantisedTag;
struct GateTag;
}  // namespace

const float* prepare(const WeightFormat& format, ThreadPool& pool, int64_t threads, const float* x, int64_t rows,
                     int64_t inputs) {
  if (!format.planes) return x;
  float* out = scratch<QuantisedTag>(rows * format.quantised_size(inputs) + kBeyond);
  // Less than this is not worth a hand-over to other threads.
  constexpr int64_t kWorthwhile = 8 * 1024;
  // Each takes some units of all rows.
  const int64_t parts = rows * inputs < kWorthwhile ? 1 : std::min(threads, inputs / kUnit);
  parallel(pool, parts, parts, [&](int64_t part) { quantise(format, x, rows, inputs, part, parts, out); });
  return out;
}

void linear(const WeightFormat& format, ThreadPool& pool, int64_t threads, const float* x, int64_t rows, const Matrix& w,
            float* y) {
  const float* prepared = prepare(format, pool, threads, x, rows, w.inputs);
  const int64_t unit = format.unit_outputs(w.outputs, w.row_bytes, threads);
  parallel(pool, threads, (w.outputs + unit - 1) / unit, [&](int64_t i) {
    const int64_t first = i * unit;
    format.multiply(prepared, rows, w, first, std::min(unit, w.outputs - first), y + first, w.outputs);
  });
}

void swiglu(const WeightFormat& format, ThreadPool& pool, int64_t threads, const float* x, int64_t rows, const Matrix& w,
            float* y) {
  const float* prepared = prepare(format, pool, threads, x, rows, w.inputs);
  const int64_t columns = w.outputs / 2, unit = format.unit_outputs(columns, 2 * w.row_bytes, threads);
  parallel(pool, threads, (columns + unit - 1) / unit, [&](int64_t i) {
    const int64_t first = i * unit, count = std::min(unit, columns - first);
    float* gate = scratch<GateTag>(2 * rows * unit);
    float* up = gate + rows * unit;
    format.multiply(prepared, rows, w, first, count, gate, unit);
    format.multiply(prepared, rows, w, columns + first, count, up, unit);
    for (int64_t r = 0; r < rows; r++) activate(gate + r * unit, up + r * unit, count, y + r * columns + first);
  });
}

}  // namespace jaxspec
