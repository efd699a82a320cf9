// Which rows go to which experts.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string_view>
#include <vector>

namespace jaxspec {

// The rows of a pass by expert. A pair is a row and one of its experts; pairs of an expert follow each other, rows ascending.
struct Routing {
  struct Expert {
    int64_t index;  // among the experts of this device
    int64_t first;  // pair
    int64_t count;  // pairs
    int64_t bias;   // among the experts that have biases here
  };
  std::vector<Expert> experts;   // those with rows, ascending
  std::vector<int32_t> row;      // of each pair
  std::vector<int64_t> pair;     // [rows * per_token] of each choice in order; -1 where the expert is another device's
  std::vector<float> score;      // [rows * per_token]

  int64_t pairs() const { return static_cast<int64_t>(row.size()); }
};

// What a row's scores are: the softmax of all its logits; that, divided by the sum of the chosen ones; or the softmax of the
// chosen logits alone, by which they are chosen too.
enum class Scores { kAll, kRenormalised, kChosen };

// The `per_token` best experts of a row, best first, the lower number first where two are alike, and their scores. NaN
// loses every comparison.
inline void choose_experts(const float* logits, int64_t experts, int64_t per_token, Scores scores, float* weight,
                           int32_t* choice, float* score) {
  float largest = logits[0];
  for (int64_t e = 1; e < experts; e++) largest = logits[e] > largest ? logits[e] : largest;
  if (scores == Scores::kChosen) {
    std::copy_n(logits, experts, weight);
  } else {
    float total = 0;
    for (int64_t e = 0; e < experts; e++) total += weight[e] = std::exp(logits[e] - largest);
    for (int64_t e = 0; e < experts; e++) weight[e] /= total;
  }
  float chosen = 0;
  for (int64_t j = 0; j < per_token; j++) {
    int64_t best = -1;
    for (int64_t e = 0; e < experts; e++) {
      if (std::find(choice, choice + j, e) != choice + j) continue;
      if (best < 0 || weight[e] > weight[best]) best = e;
    }
    choice[j] = static_cast<int32_t>(best);
    score[j] = scores == Scores::kChosen ? std::exp(weight[best] - largest) : weight[best];
    chosen += score[j];
  }
  if (scores != Scores::kAll)
    for (int64_t j = 0; j < per_token; j++) score[j] /= chosen;
}

// Which scores a name stands for.
inline Scores scores_named(std::string_view name) {
  return name == "chosen" ? Scores::kChosen : name == "all" ? Scores::kAll : Scores::kRenormalised;
}

// Sort choices of experts, `per_token` for each row, by expert: `place(e)` is where the weights of expert e lie among
// `local` experts, negative where they are not here. Biases lie in order, from those of expert `first` on.
template <class Place>
void sort_choices(const int32_t* choice, int64_t choices, int64_t per_token, int64_t first, int64_t local, Place place,
                  Routing& routing) {
  std::vector<int64_t> next(local + 1, 0), bias(local, 0);
  routing.pair.assign(choices, -1);
  for (int64_t i = 0; i < choices; i++) {
    const int64_t at = place(choice[i]);
    if (at < 0 || at >= local) continue;
    next[at + 1]++;
    bias[at] = choice[i] - first;
  }
  for (int64_t at = 0; at < local; at++) {
    if (next[at + 1]) routing.experts.push_back({at, next[at], next[at + 1], bias[at]});
    next[at + 1] += next[at];
  }
  routing.row.resize(next[local]);
  for (int64_t i = 0; i < choices; i++) {
    const int64_t at = place(choice[i]);
    if (at < 0 || at >= local) continue;
    routing.pair[i] = next[at]++;
    routing.row[routing.pair[i]] = static_cast<int32_t>(i / per_token);
  }
}

// Route `rows` rows by logits `[rows, experts]`; this device has `local` of the experts, from `first` on.
inline Routing route(const float* logits, int64_t rows, int64_t experts, int64_t per_token, Scores scores, int64_t first,
                     int64_t local) {
  Routing routing;
  const int64_t choices = rows * per_token;
  std::vector<int32_t> choice(choices);
  std::vector<float> weight(experts);
  routing.score.resize(choices);
  for (int64_t t = 0; t < rows; t++)
    choose_experts(logits + t * experts, experts, per_token, scores, weight.data(), choice.data() + t * per_token,
                   routing.score.data() + t * per_token);
  sort_choices(choice.data(), choices, per_token, first, local, [first](int64_t e) { return e - first; }, routing);
  return routing;
}

// Rows whose experts and scores are known, `[rows, per_token]`: the weights of expert e lie at `places[e]`. Negative choices
// and places stand for nothing.
inline Routing route_chosen(const int32_t* choice, const float* score, int64_t rows, int64_t per_token,
                            const int32_t* places, int64_t experts, int64_t local) {
  Routing routing;
  const int64_t choices = rows * per_token;
  routing.score.assign(score, score + choices);
  const auto place = [places, experts](int64_t e) -> int64_t { return e < 0 || e >= experts ? -1 : places[e]; };
  sort_choices(choice, choices, per_token, 0, local, place, routing);
  return routing;
}

}  // namespace jaxspec
