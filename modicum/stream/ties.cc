#include "modicum/stream/ties.h"

#include <fmt/format.h>

#include <algorithm>

#include "modicum/kernels/kernels.h"

namespace modicum {
namespace {

constexpr uint64_t kSeed = 0x7469652d7469652dULL;  // the same for an alias and its target

}  // namespace

Ties::Ties(const Plan& plan) : plan_(plan), sums_(std::make_unique<Sums[]>(plan.ties.size())) {}

// A linear search, since most models have no tie, and a model with ties rarely has more than one.
bool Ties::has(const Transfer& transfer) const noexcept {
  if (transfer.source == Transfer::Source::zero) return false;
  return std::any_of(plan_.ties.begin(), plan_.ties.end(), [&](const Tie& tie) {
    return tie.alias == transfer.target || tie.target == transfer.target;
  });
}

void Ties::add(const Transfer& transfer, int64_t at, std::span<const std::byte> elements) noexcept {
  if (!has(transfer)) return;
  // Elements smaller than a byte are hashed byte by byte; a run of them ends at the end of a byte.
  const int bits = bits_per_element(transfer.to_dtype);
  const int bytes = std::max(8, bits) / 8;
  const int64_t first = at * bits / 8 / bytes;
  const auto n = static_cast<int64_t>(elements.size()) / bytes;
  const uint64_t sum = digest_run(kSeed, elements.data(), bytes, first, n);
  for (size_t i = 0; i < plan_.ties.size(); ++i) {
    if (plan_.ties[i].alias == transfer.target)
      sums_[i].alias.fetch_add(sum, std::memory_order_relaxed);
    if (plan_.ties[i].target == transfer.target)
      sums_[i].target.fetch_add(sum, std::memory_order_relaxed);
  }
}

void Ties::add(const Transfer& done, std::span<const std::byte> host) noexcept {
  if (!has(done)) return;
  const Runs& runs = done.runs;
  const bool contiguous = runs.at_step == 1 || runs.length == 1;
  const int64_t n = contiguous ? runs.length : 1;
  for (int64_t k = 0; k < runs.count; ++k) {
    for (int64_t i = 0; i < runs.length; i += n) {
      const int64_t at = runs.at + k * runs.at_stride + i * runs.at_step;
      add(done, at, host.subspan(bytes_of(done.to_dtype, at), bytes_of(done.to_dtype, n)));
    }
  }
}

void Ties::prove(int rank) const {
  for (size_t i = 0; i < plan_.ties.size(); ++i) {
    if (sums_[i].alias == sums_[i].target) continue;
    const std::string& target = plan_.recipe->targets[plan_.ties[i].target].spec.fqn;
    const std::string& alias = plan_.recipe->targets[plan_.ties[i].alias].spec.fqn;
    fail(Category::mismatch,
         fmt::format(
             "'{}' is tied to '{}', but both are stored and their values differ; --untie, or "
             "in Python a model built with tie_word_embeddings=False, loads both",
             printable(alias), printable(target)),
         {.tensor = alias, .rank = rank});
  }
}

}  // namespace modicum
