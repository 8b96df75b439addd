#include <fmt/format.h>

#include "modicum/plan/plan.h"

namespace modicum {
namespace {

constexpr std::array<Strategy, 5> kStrategies = {{
    {"full-per-rank", Reader::every_rank, Window::whole_model, Window::whole_model},
    {"rank0-broadcast", Reader::rank_0, Window::whole_model, Window::one_tensor},
    {"own-shard", Reader::every_rank, Window::none, Window::none},
    {"node-reader", Reader::node_leader, Window::none, Window::none},
    {"replica-striped", Reader::replicas, Window::none, Window::none},
}};

}  // namespace

std::span<const Strategy> strategies() noexcept { return kStrategies; }

const Strategy& strategy_named(std::string_view name) {
  std::vector<std::string> names;
  for (const Strategy& strategy : kStrategies) {
    if (strategy.name == name) return strategy;
    names.emplace_back(strategy.name);
  }
  fail(Category::usage,
       fmt::format("unknown strategy '{}'{}", printable(name), nearest_hint(name, names)));
}

}  // namespace modicum
