// What a rank must put into its buffers, one run after the other.
#include <fmt/format.h>

#include "modicum/plan/plan.h"
#include "modicum/plan/scales.h"

namespace modicum {
namespace {

using Emit = std::function<void(const Transfer&)>;

// Besides a stored tensor's number: of which sources transfers are wanted.
constexpr uint32_t kAnySource = UINT32_MAX;
constexpr uint32_t kAnyStored = UINT32_MAX - 1;

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

void emit_runs(Transfer transfer, const Box& part, const Emit& fn) {
  for_each_runs(part, [&](const Runs& runs) {
    transfer.runs = runs;
    fn(transfer);
  });
}

// Padding has a source like everything else: it is named zero.
void emit_padding(uint32_t target, uint32_t buffer, const LocalBuffer& local, const Emit& fn) {
  if (local.padded_numel == local.numel) return;
  Transfer zero;
  zero.source = Transfer::Source::zero;
  zero.target = target;
  zero.buffer = buffer;
  zero.from_dtype = zero.to_dtype = local.dtype;
  zero.runs = {.run = local.padded_numel - local.numel, .at = local.numel};
  fn(zero);
}

void emit_piece(const Plan& plan, uint32_t target, uint32_t buffer, const Box& piece, uint32_t only,
                const Emit& fn) {
  const uint32_t root_id = plan.recipe->read_node(target);
  const Node& root = plan.recipe->nodes[root_id];
  const auto emit = [&](const Node& leaf, const Box& part) {
    if (only < kAnyStored && (leaf.op != Op::stored || leaf.from != only)) return;
    Transfer transfer = from_leaf(plan, leaf, target);
    transfer.buffer = buffer;
    emit_runs(transfer, part, fn);
  };
  // Identity: the piece is the part. Most transfers of most plans.
  if (root.op == Op::stored) return emit(root, piece);
  pull_back(*plan.recipe, root_id, piece, emit, only == kAnySource ? Leaves::all : Leaves::stored);
}

void emit_target(const Plan& plan, int rank, uint32_t target, uint32_t only, const Emit& fn) {
  if (plan.recipe->is_compared(target)) {  // where its target's elements are; padding has no value
    for_each_piece(plan, holder_of(plan, target), rank, [&](uint32_t, const Box& piece) {
      emit_piece(plan, target, target, piece, only, fn);
    });
    return;
  }
  if (plan.layout.is_flat(target)) {
    for_each_piece(plan, target, rank, [&](uint32_t buffer, const Box& piece) {
      emit_piece(plan, target, buffer, piece, only, fn);
    });
    return;
  }
  // One reference is all that the callback holds: millions of them are made, and a larger one would
  // be allocated.
  const struct {
    const Plan& plan;
    uint32_t target, only;
    const Emit& fn;
  } own{plan, target, only, fn};
  const LocalBuffer local =
      for_each_piece(plan.layout.sharding_of(target), plan.recipe->targets[target].spec, rank,
                     [&own](const Box& piece) {
                       emit_piece(own.plan, own.target, own.target, piece, own.only, own.fn);
                     });
  if (only == kAnySource) emit_padding(target, target, local, fn);
}

}  // namespace

void for_each_transfer(const Plan& plan, int rank, const Emit& fn) {
  for (const uint32_t target : plan.order) emit_target(plan, rank, target, kAnySource, fn);
  for (uint32_t f = 0; f < plan.layout.flats.size(); ++f) {
    const FlatGroup& flat = plan.layout.flats[f];
    const auto buffer = static_cast<uint32_t>(plan.recipe->targets.size()) + f;
    emit_padding(flat.targets.back(), buffer, local_buffer(flat, rank), fn);
  }
}

void for_each_transfer_of(const Plan& plan, int rank, uint32_t target, const Emit& fn) {
  emit_target(plan, rank, target, kAnySource, fn);
}

void for_each_stored_transfer(const Plan& plan, int rank, const Emit& fn) {
  for (const uint32_t target : plan.order) emit_target(plan, rank, target, kAnyStored, fn);
}

void for_each_stored_transfer_of(const Plan& plan, int rank, uint32_t target, const Emit& fn) {
  emit_target(plan, rank, target, kAnyStored, fn);
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

Extent extent_of(const Stored& stored, int64_t first, int64_t count) {
  const auto bits = static_cast<uint64_t>(bits_per_element(stored.spec.dtype));
  // At most eight times kMaxModelBytes.
  const uint64_t begin_bits = static_cast<uint64_t>(first) * bits;
  const uint64_t end_bits = static_cast<uint64_t>(first + count) * bits;
  if (begin_bits % 8 != 0 || end_bits % 8 != 0) {
    fail(Category::unsupported,
         fmt::format("a cut of a {} tensor that does not fall on a byte",
                     stored_name(stored.spec.dtype)),
         {.tensor = stored.spec.fqn});
  }
  return {stored.at.file, stored.at.begin + begin_bits / 8, stored.at.begin + end_bits / 8};
}

}  // namespace modicum
