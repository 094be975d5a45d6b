/* The reasons as text. */
#include "dropin/reason.h"

const char *ob_reason_text(enum ob_reason reason) {
  static const char *const texts[OB_REASON_COUNT] = {
      [OB_REASON_NONE] = "compressed",
      [OB_REASON_TYPE] = "the type is not float, double, bfloat16 or half",
      [OB_REASON_OPERATION] = "the operation is neither a sum nor a mean",
      [OB_REASON_SMALL] = "below minimum size",
      [OB_REASON_ALONE] = "one rank, or an inter-communicator",
      [OB_REASON_RULE] = "no rule asks for it",
      [OB_REASON_LEARNING] = "not yet seen often enough",
      [OB_REASON_UNSTABLE] = "calls do not repeat",
      [OB_REASON_WITHDRAWN] = "values not finite, beyond float, or far below the call before",
      [OB_REASON_WATCHED] = "only watched: neither --gradients nor a rule asks for it",
      [OB_REASON_UNFAITHFUL] = "exact again: error feedback does not follow it",
      [OB_REASON_CALL] = "a call that is never compressed",
      [OB_REASON_MEMORY] = "no plan could be made",
      [OB_REASON_CAPTURED] = "it is in a CUDA graph",
      [OB_REASON_REFUSED] = "a setting is wrong, ranks differ, or threads forbid it",
  };
  return reason >= 0 && reason < OB_REASON_COUNT ? texts[reason] : "unknown reason";
}
