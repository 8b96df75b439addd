// The difference between two configurations of DeepSpeed, for a user to make.
#include "modicum/baselines/deepspeed.h"
#include "modicum/json/json.h"

namespace modicum {
namespace {

using Offload = DeepSpeedConfig::Offload;

// A member for an offload that is turned off, or no longer pins memory.
void offload_member(JsonWriter& out, std::string_view key, const Offload& from, const Offload& to) {
  if (!from.to_cpu) return;
  if (!to.to_cpu) {
    out.key(key).begin_object().member("device", "none").end_object();
  } else if (from.pin_memory != to.pin_memory) {
    out.key(key).begin_object().member("pin_memory", to.pin_memory).end_object();
  }
}

}  // namespace

std::string deepspeed_patch(const DeepSpeedConfig& from, const DeepSpeedConfig& to) {
  JsonWriter zero;
  zero.begin_object();
  if (from.stage != to.stage) zero.member("stage", to.stage);
  offload_member(zero, "offload_optimizer", from.optimizer, to.optimizer);
  offload_member(zero, "offload_param", from.param, to.param);
  if (zero.end_object().text() == "{}") return "";
  return JsonWriter().begin_object().key("zero_optimization").json(zero.text()).end_object().take();
}

}  // namespace modicum
