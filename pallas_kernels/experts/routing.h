// Which rows go to which experts.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace jaxspec {

// The rows of a pass by expert. A pair is a row and one of its experts; pairs of an expert follow each other, rows ascending.
struct Routing {
  struct Expert {
    int64_t index;  // among the experts of this device
    int64_t first;  // pair
    int64_t count;  // pairs
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

// Route `rows` rows by logits `[rows, experts]`; this device has `local` of the experts, from `first` on.
inline Routing route(const float* logits, int64_t rows, int64_t experts, int64_t per_token, Scores scores, int64_t first,
                     int64_t local) {
  Routing routing;
  const int64_t choices = rows * per_token;
  std::vector<int32_t> choice(choices);
  std::vector<float> weight(experts);
  routing.score.resize(choices);
  routing.pair.assign(choices, -1);
  for (int64_t t = 0; t < rows; t++)
    choose_experts(logits + t * experts, experts, per_token, scores, weight.data(), choice.data() + t * per_token,
                   routing.score.data() + t * per_token);
  std::vector<int64_t> next(local + 1, 0);
  for (int32_t e : choice)
    if (e >= first && e < first + local) next[e - first + 1]++;
  for (int64_t e = 0; e < local; e++) {
    if (next[e + 1]) routing.experts.push_back({e, next[e], next[e + 1]});
    next[e + 1] += next[e];
  }
  routing.row.resize(next[local]);
  for (int64_t i = 0; i < choices; i++) {
    const int64_t e = choice[i] - first;
    if (e < 0 || e >= local) continue;
    routing.pair[i] = next[e]++;
    routing.row[routing.pair[i]] = static_cast<int32_t>(i / per_token);
  }
  return routing;
}

}  // namespace jaxspec
