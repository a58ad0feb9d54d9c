// SPDX-License-Identifier: Apache-2.0
#include "score/plan.hpp"

#include <algorithm>
#include <bit>
#include <span>

#include "core/error.hpp"

namespace lowbit {
namespace {

using namespace score;

bool is_after(Stage stage) { return stage > Stage::tile; }

Stage stage_of(Rate rate, bool after) {
  switch (rate) {
    case Rate::constant: case Rate::head: return after ? Stage::head_after : Stage::head;
    case Rate::row: return after ? Stage::row_after : Stage::row;
    case Rate::column: return after ? Stage::column_after : Stage::column;
    case Rate::diagonal: return after ? Stage::diagonal_after : Stage::diagonal;
    case Rate::tile: break;
  }
  return Stage::tile;
}

class Planner {
 public:
  Planner(const ScoreGraph& graph, int output, int memory, std::span<const int> scatters)
      : nodes_(graph.nodes), forms_(affine_forms(graph)), output_(output), memory_(memory),
        roots_(scatters.begin(), scatters.end()) {
    roots_.push_back(output);
  }

  ScorePlan plan(bool fused) {
    if (roots_.size() == 1 && nodes_[output_].op == memory_leaf()) return {};
    count_uses();
    if (fused) fuse();
    find_stages();
    place_registers();
    std::vector<int> order;
    for (int stage = 0; stage < kStages; stage++) {
      plan_.begin[stage] = static_cast<int>(plan_.steps.size());
      order.clear();
      for (std::size_t i = 0; i < nodes_.size(); i++)
        if (uses_[i] && is_step(i) && stages_[i] == static_cast<Stage>(stage)) order.push_back(static_cast<int>(i));
      if (static_cast<Stage>(stage) == Stage::tile) plan_tile(order);
      else
        for (int node : order) plan_.steps.push_back(step(node));
    }
    plan_.begin[kStages] = static_cast<int>(plan_.steps.size());
    return std::move(plan_);
  }

 private:
  int memory_leaf() const { return memory_ == kScoreMemory ? number_of<Score>() : number_of<Gradient>(); }
  bool is_leaf_in_memory(int node) const {
    return nodes_[node].op == number_of<Score>() || nodes_[node].op == number_of<Gradient>();
  }
  bool is_step(int node) const { return nodes_[node].rate != Rate::constant && !is_leaf_in_memory(node); }

  void count_uses() {
    uses_.assign(nodes_.size(), 0);
    for (int root : roots_) uses_[root]++;
    for (int i = static_cast<int>(nodes_.size()) - 1; i >= 0; i--)
      for (int j = 0; uses_[i] && j < nodes_[i].operand_count; j++) uses_[nodes_[i].operands[j]]++;
  }

  // Fuses several steps over the scores into one: half of the loads and stores. It rounds once less, so values that do
  // not depend on the score, which may enter a floor, stay unfused.
  void fuse() {
    for (ScoreNode& node : nodes_) {
      if (node.rate != Rate::tile || !node.of_score) continue;
      for (int i = 0; i < 2; i++) {
        const int term = node.operands[1 - i];
        const ScoreNode* inner = only_use_of(node.operands[i]);
        if (!inner) continue;
        if (node.op == number_of<Add>() && inner->op == number_of<Mul>()) {  // a * b + c
          node = ternary(number_of<MultiplyAdd>(), inner->operands[0], inner->operands[1], term);
        } else if (node.op == number_of<Mul>() && inner->op == number_of<Tanh>()) {  // c * tanh(a * b): a soft cap
          const ScoreNode* scaled = only_use_of(inner->operands[0]);
          if (scaled && scaled->op == number_of<Mul>())
            node = ternary(number_of<ScaledTanh>(), scaled->operands[0], scaled->operands[1], term);
        }
      }
    }
    count_uses();
  }
  const ScoreNode* only_use_of(int node) const {
    return nodes_[node].rate == Rate::tile && uses_[node] == 1 ? &nodes_[node] : nullptr;
  }
  static ScoreNode ternary(int op, int a, int b, int c) {
    return {.op = op, .type = 'f', .rate = Rate::tile, .of_score = true, .operand_count = 3, .operands = {a, b, c}};
  }

  // A sum is computed where its operand is available, and can be read in a later stage.
  void find_stages() {
    stages_.resize(nodes_.size());
    for (std::size_t i = 0; i < nodes_.size(); i++) {
      const ScoreNode& node = nodes_[i];
      bool after = false;
      for (int j = 0; j < node.operand_count; j++) {
        const int operand = node.operands[j];
        after |= is_after(stages_[operand]) || nodes_[operand].op == number_of<Sum>();
      }
      stages_[i] = stage_of(node.op == number_of<Sum>() ? nodes_[node.operands[0]].rate : node.rate, after);
    }
  }

  int fresh(Rate rate) { return plan_.registers[static_cast<int>(rate)]++; }

  void place_registers() {
    places_.resize(nodes_.size());
    for (std::size_t i = 0; i < nodes_.size(); i++) {
      const ScoreNode& node = nodes_[i];
      if (!uses_[i] || node.op == number_of<ScatterAdd>()) continue;
      ScoreOperand& place = places_[i];
      place.rate = node.rate;
      if (node.op == number_of<Score>()) place.at = kScoreMemory;
      else if (node.op == number_of<Gradient>()) place.at = kGradientMemory;
      else if (node.rate != Rate::tile) place.at = fresh(node.rate);
      if (node.rate == Rate::constant) plan_.constants.push_back({node.type, node.immediate});
    }
  }

  static int32_t growth(const Affine& form, int64_t coefficient) {
    return form.valid && coefficient >= -INT32_MAX && coefficient <= INT32_MAX ? static_cast<int32_t>(coefficient)
                                                                               : ScoreStep::kNotLinear;
  }

  ScoreStep step(int number) const {
    const ScoreNode& node = nodes_[number];
    ScoreStep step{.op = static_cast<int16_t>(node.op),
                   .type = node.type,
                   .operand_count = static_cast<uint8_t>(node.operand_count),
                   .out = places_[number],
                   .immediate = node.immediate};
    if (node.op == number_of<ScatterAdd>()) step.out.rate = node.rate;
    const int first_index = node.op == number_of<ScatterAdd>() ? 1 : 0;
    for (int j = 0; j < node.operand_count; j++) {
      step.operands[j] = places_[node.operands[j]];
      if (node.op == number_of<Gather>() || node.op == number_of<ScatterAdd>())
        if (j >= first_index) {
          const Affine& form = forms_[node.operands[j]];
          step.along[j] = growth(form, node.rate == Rate::row ? form.q : form.k);
          step.down[j] = growth(form, form.q);
        }
    }
    return step;
  }

  // Tile registers are reused as soon as no later step reads them. The output overwrites the input unless a later step
  // reads that.
  void plan_tile(std::vector<int> order) {
    const bool tile_output = nodes_[output_].rate == Rate::tile && is_step(output_) && stages_[output_] == Stage::tile;
    if (tile_output && uses_[output_] == 1) {
      order.erase(std::find(order.begin(), order.end(), output_));
      order.push_back(output_);
    }
    std::vector<int> last_read(nodes_.size(), -1);
    int last_read_of_memory = -1;
    for (std::size_t at = 0; at < order.size(); at++)
      for (int j = 0; j < nodes_[order[at]].operand_count; j++) {
        const int operand = nodes_[order[at]].operands[j];
        last_read[operand] = static_cast<int>(at);
        if (nodes_[operand].op == memory_leaf()) last_read_of_memory = static_cast<int>(at);
      }
    const int output_at = static_cast<int>(std::find(order.begin(), order.end(), output_) - order.begin());
    const bool direct = tile_output && last_read_of_memory <= output_at;
    std::vector<int32_t> free;
    for (std::size_t at = 0; at < order.size(); at++) {
      const int number = order[at];
      const ScoreNode& node = nodes_[number];
      for (int j = 0; j < node.operand_count;
           j++) {  // an operand read for the last time hands its register to the result
        const int operand = node.operands[j];
        const bool twice =
            std::find(node.operands.begin(), node.operands.begin() + j, operand) != node.operands.begin() + j;
        const bool held = nodes_[operand].rate == Rate::tile && places_[operand].at >= 0 && operand != output_;
        if (held && !twice && last_read[operand] == static_cast<int>(at)) free.push_back(places_[operand].at);
      }
      if (node.op != number_of<ScatterAdd>() && node.rate == Rate::tile) {
        if (number == output_ && direct) places_[number].at = memory_;
        else if (free.empty()) places_[number].at = fresh(Rate::tile);
        else places_[number].at = free.back(), free.pop_back();
      }
      plan_.steps.push_back(step(number));
    }
    if (direct || nodes_[output_].op == memory_leaf()) return;
    ScoreStep copy{.op = static_cast<int16_t>(number_of<Copy>()), .operand_count = 1, .out = {Rate::tile, memory_}};
    copy.operands[0] = places_[output_];
    plan_.steps.push_back(copy);
  }

  std::vector<ScoreNode> nodes_;
  std::vector<Affine> forms_;
  int output_, memory_;
  std::vector<int> roots_;
  std::vector<int> uses_;
  std::vector<Stage> stages_;
  std::vector<ScoreOperand> places_;
  ScorePlan plan_;
};

// Checks the machine's assumptions: an operand is a constant, a register of the plan, or, elementwise in the tile, the
// caller's memory.
void check_places(const ScorePlan& plan, std::size_t captured) {
  const auto is_place = [&](ScoreOperand place, bool memory) {
    const int count = place.rate == Rate::constant ? static_cast<int>(plan.constants.size())
                                                   : plan.registers[static_cast<int>(place.rate)];
    return place.at < count && (place.at >= 0 || (memory && place.rate == Rate::tile && place.at >= kGradientMemory));
  };
  for (const ScoreStep& step : plan.steps) {
    const bool of_tensor = step.op == number_of<Gather>() || step.op == number_of<ScatterAdd>(),
               sum = step.op == number_of<Sum>();
    bool good = !of_tensor || (step.immediate >= 0 && step.immediate < static_cast<int64_t>(captured));
    good &= step.op == number_of<ScatterAdd>() ||
            (is_place(step.out, !sum) && step.out.rate != Rate::constant && !(sum && step.out.rate == Rate::tile));
    for (int j = 0; j < step.operand_count; j++) good &= is_place(step.operands[j], true);
    check(good, ErrorKind::runtime, "score program: its step ", op_info(step.op).name,
          " has a place that the plan does not have");
  }
}

}  // namespace

ScorePlan score_plan(const ScoreGraph& graph, int output, int memory, std::span<const int> scatters, bool fused) {
  ScorePlan plan = Planner(graph, output, memory, scatters).plan(fused);
  check_places(plan, graph.captured.size());
  return plan;
}

std::string plan_text(const ScorePlan& plan) {
  constexpr std::string_view kStageNames[] = {"head",      "row",          "column",         "diagonal",  "tile",
                                              "row after", "column after", "diagonal after", "head after"};
  std::string text;
  const auto operand = [&](ScoreOperand place) {
    if (place.at == kScoreMemory) return std::string("score");
    if (place.at == kGradientMemory) return std::string("gradient");
    if (place.rate == Rate::constant) {
      const ScoreConstant& constant = plan.constants[place.at];
      return constant.type == 'f' ? concat(std::bit_cast<double>(constant.bits)) : std::to_string(constant.bits);
    }
    return concat(kRateNames[static_cast<int>(place.rate)], place.at);
  };
  for (int stage = 0; stage < kStages; stage++)
    for (int at = plan.begin[stage]; at < plan.begin[stage + 1]; at++) {
      const ScoreStep& step = plan.steps[at];
      std::string line = concat(kStageNames[stage], ": ");
      if (step.op != number_of<ScatterAdd>()) line += operand(step.out) + " = ";
      line += op_info(step.op).name;
      if (step.op == number_of<Gather>() || step.op == number_of<ScatterAdd>()) line += concat(" t", step.immediate);
      for (int j = 0; j < step.operand_count; j++) line += (j ? ", " : " ") + operand(step.operands[j]);
      text += line + "\n";
    }
  return text;
}

}  // namespace lowbit
