// The parts of the promise of a run with an optimizer.
#include "modicum/plan/plan.h"

namespace modicum {

Promise part_of(const Promise& promise, Part part) {
  constexpr auto kStep = static_cast<ptrdiff_t>(kLoadPhases);
  const auto begin = promise.phases.begin(), step = begin + kStep, end = promise.phases.end();
  MODICUM_ASSERT(step != end);
  Promise result = promise;
  switch (part) {
    case Part::load: result.phases.assign(begin, step); break;
    case Part::step: result.phases.assign(step, step + 1); break;
    case Part::save: result.phases.assign(step + 1, end); break;
    case Part::resume: result.phases.erase(result.phases.begin() + kStep); break;
  }
  return result;
}

}  // namespace modicum
