// What a rank must put into its buffers, one run after the other.
#include <fmt/format.h>

#include "modicum/plan/plan.h"
#include "modicum/plan/scales.h"

namespace modicum {
namespace {

using Emit = std::function<void(const Transfer&)>;

constexpr uint32_t kAnySource = UINT32_MAX;

Transfer from_leaf(const Plan& plan, const Node& leaf, uint32_t target) {
  Transfer transfer;
  transfer.buffer = target;
  transfer.from_dtype = leaf.dtype;
  transfer.to_dtype = plan.recipe->targets[target].spec.dtype;
  switch (leaf.op) {
    case Op::stored:
      transfer.source = Transfer::Source::stored;
      transfer.from = leaf.from;
      break;
    case Op::init:
      transfer.source = Transfer::Source::init;
      transfer.from = static_cast<uint32_t>(&leaf - plan.recipe->nodes.data());
      break;
    default: transfer.source = Transfer::Source::caller; transfer.from = leaf.from;
  }
  return transfer;
}

void emit_runs(Transfer transfer, const Box& part, const Emit& fn) {
  for_each_runs(part, [&](const Runs& runs) {
    transfer.runs = runs;
    fn(transfer);
  });
}

// Padding has a source like everything else: it is named zero.
void emit_padding(const Plan& plan, uint32_t target, const LocalBuffer& buffer, const Emit& fn) {
  if (buffer.padded_numel == buffer.numel) return;
  Transfer zero;
  zero.source = Transfer::Source::zero;
  zero.buffer = target;
  zero.from_dtype = zero.to_dtype = plan.recipe->targets[target].spec.dtype;
  zero.runs = {.run = buffer.padded_numel - buffer.numel, .at = buffer.numel};
  fn(zero);
}

void emit_target(const Plan& plan, int rank, uint32_t target, uint32_t only, const Emit& fn) {
  const Target& of = plan.recipe->targets[target];
  const Node& root = plan.recipe->nodes[of.root];
  const LocalBuffer buffer = for_each_piece(plan.layout, of.spec, rank, [&](const Box& piece) {
    if (root.op == Op::stored) {  // identity: the piece is the part; most transfers of most plans
      if (only == kAnySource || only == root.from) {
        emit_runs(from_leaf(plan, root, target), piece, fn);
      }
      return;
    }
    pull_back(*plan.recipe, of.root, piece, [&](const Node& leaf, const Box& part) {
      if (only != kAnySource && (leaf.op != Op::stored || leaf.from != only)) return;
      emit_runs(from_leaf(plan, leaf, target), part, fn);
    });
  });
  if (only == kAnySource) emit_padding(plan, target, buffer, fn);
}

}  // namespace

void for_each_transfer(const Plan& plan, int rank, const Emit& fn) {
  for (const uint32_t target : plan.order) emit_target(plan, rank, target, kAnySource, fn);
}

void for_each_transfer_from(const Plan& plan, int rank, uint32_t only_stored, const Emit& fn) {
  for (uint32_t i = plan.uses_begin[only_stored]; i < plan.uses_begin[only_stored + 1]; ++i) {
    const uint32_t target = plan.uses[i];
    if (takes_elements(plan, target, only_stored)) emit_target(plan, rank, target, only_stored, fn);
  }
}

bool is_needed(const Plan& plan, uint32_t stored) noexcept {
  return plan.uses_begin[stored] != plan.uses_begin[stored + 1];
}

std::vector<uint64_t> window_begins(const Plan& plan) {
  std::vector<uint64_t> begins;
  begins.reserve(plan.manifest->tensors.size() + 1);
  uint64_t end = 0;
  for (uint32_t s = 0; s < plan.manifest->tensors.size(); ++s) {
    begins.push_back(end);
    if (is_needed(plan, s)) end += round_up(plan.manifest->tensors[s].at.bytes(), kBufferAlignment);
  }
  begins.push_back(end);
  return begins;
}

Extent extent_of(const Stored& stored, int64_t first, int64_t count) {
  const int bits = bits_per_element(stored.spec.dtype);
  const int64_t begin_bits = first * bits;
  const int64_t end_bits = (first + count) * bits;
  if (begin_bits % 8 != 0 || end_bits % 8 != 0) {
    fail(Category::unsupported,
         fmt::format("a cut of a {} tensor that does not fall on a byte",
                     stored_name(stored.spec.dtype)),
         {.tensor = stored.spec.fqn});
  }
  return {stored.at.file, stored.at.begin + static_cast<uint64_t>(begin_bits / 8),
          stored.at.begin + static_cast<uint64_t>(end_bits / 8)};
}

}  // namespace modicum
