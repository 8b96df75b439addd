// The transfers of a rank: which elements go to which places of its local buffers.
#include <fmt/format.h>

#include "modicum/plan/inside.h"
#include "modicum/plan/plan.h"

namespace modicum {
namespace {

using Emit = FunctionRef<void(const Transfer&)>;

// Selects the leaves whose transfers are emitted: all stored tensors, one of them, or the leaves
// that need no read.
struct LeafSelection {
  static constexpr uint32_t kAll = UINT32_MAX;

  bool is_made = false;
  uint32_t stored = kAll;

  bool takes(const Node& leaf) const noexcept {
    if (leaf.op != Op::stored) return is_made;
    return !is_made && (stored == kAll || stored == leaf.from);
  }
};

Transfer from_leaf(const Plan& plan, const Node& leaf, uint32_t target) {
  Transfer transfer;
  transfer.target = target;
  transfer.compared = plan.recipe->is_compared(target);
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

void emit_runs(Transfer transfer, const Box& part, Emit fn) {
  for_each_runs(part, [&](const Runs& runs) {
    transfer.runs = runs;
    fn(transfer);
  });
}

// Padding is a transfer from source zero, so that coverage counts it like any other element.
void emit_padding(uint32_t target, uint32_t buffer, const LocalBuffer& local, Emit fn) {
  if (local.padded_numel == local.numel) return;
  Transfer zero;
  zero.source = Transfer::Source::zero;
  zero.target = target;
  zero.buffer = buffer;
  zero.from_dtype = zero.to_dtype = local.dtype;
  zero.runs = {.length = local.padded_numel - local.numel, .at = local.numel};
  fn(zero);
}

void emit_target(const Plan& plan, int rank, uint32_t target, const LeafSelection& wanted,
                 Emit fn) {
  const uint32_t root_id = plan.recipe->read_node(target);
  const Node& root = plan.recipe->nodes[root_id];
  const auto emit_piece = [&](uint32_t buffer, const Box& piece) {
    const auto emit = [&](const Node& leaf, const Box& part) {
      if (!wanted.takes(leaf)) return;
      Transfer transfer = from_leaf(plan, leaf, target);
      transfer.buffer = buffer;
      emit_runs(transfer, part, fn);
    };
    // Most targets are one stored tensor: then the piece is also a part of that tensor.
    if (root.op == Op::stored) return emit(root, piece);
    pull_back(*plan.recipe, root_id, piece, emit, wanted.is_made ? Leaves::all : Leaves::stored);
  };
  // A compared alias is held in the same pieces as the target that it names.
  const uint32_t holder = holder_of(plan, target);
  for_each_piece(*plan.recipe, plan.layout, holder, rank, emit_piece);
}

}  // namespace

void for_each_stored_transfer(const Plan& plan, int rank, Emit fn) {
  for (const uint32_t target : plan.order) emit_target(plan, rank, target, {}, fn);
}

void for_each_made_transfer(const Plan& plan, int rank, Emit fn) {
  for (const uint32_t target : plan.order) {
    const bool is_stored = plan.recipe->nodes[plan.recipe->read_node(target)].op == Op::stored;
    if (!is_stored) emit_target(plan, rank, target, {.is_made = true}, fn);
    if (!plan.recipe->is_alias(target)) {
      emit_padding(target, target, buffer_of(plan, target, rank), fn);
    }
  }
  for (uint32_t f = 0; f < plan.layout.flats.size(); ++f) {
    const auto buffer = static_cast<uint32_t>(plan.recipe->targets.size()) + f;
    const uint32_t last = plan.layout.flats[f].targets.back();
    emit_padding(last, buffer, buffer_of(plan, buffer, rank), fn);
  }
}

void for_each_transfer_of(const Plan& plan, int rank, uint32_t target, Emit fn) {
  checked_index("target", target, plan.recipe->targets.size());
  emit_target(plan, rank, target, {}, fn);
}

void for_each_transfer_from(const Plan& plan, int rank, uint32_t stored, Emit fn) {
  checked_index("stored tensor", stored, plan.manifest->tensors.size());
  for (const uint32_t target : plan.uses.targets_of(stored)) {
    if (takes_elements(plan, target, stored)) {
      emit_target(plan, rank, target, {.stored = stored}, fn);
    }
  }
}

Extent extent_of(const StoredTensor& stored, int64_t first, int64_t count) {
  const auto bits = static_cast<uint64_t>(bits_per_element(stored.spec.dtype));
  // At most eight times kMaxModelBytes, so there is no overflow.
  const uint64_t begin_bits = static_cast<uint64_t>(first) * bits;
  const uint64_t end_bits = static_cast<uint64_t>(first + count) * bits;
  if (begin_bits % 8 != 0 || end_bits % 8 != 0) {
    fail(Category::unsupported,
         fmt::format("a shard of a {} tensor begins or ends inside a byte",
                     stored_name(stored.spec.dtype)),
         {.tensor = stored.spec.fqn});
  }
  return {stored.at.file, stored.at.begin + begin_bits / 8, stored.at.begin + end_bits / 8};
}

}  // namespace modicum
