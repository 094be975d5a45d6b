/* Reasons why a program's calls are not compressed, in an order that reports keep. */
#ifndef OB_DROPIN_REASON_H
#define OB_DROPIN_REASON_H

/* The reason why a call can not be compressed, or is not. Reports count by it. */
enum ob_reason {
  OB_REASON_NONE = 0,  /* it can be */
  OB_REASON_TYPE,      /* not float, double, bfloat16, half */
  OB_REASON_OPERATION, /* neither a sum nor a mean */
  OB_REASON_SMALL,     /* below the least number of bytes */
  OB_REASON_ALONE,     /* one rank, or an inter-communicator */
  OB_REASON_RULE,      /* a rule says so, or none asks for it (allgathers) */
  OB_REASON_LEARNING,  /* not yet seen often enough, in this order */
  OB_REASON_UNSTABLE,  /* the order of calls does not repeat */
  /* compressed, but a rank had values that are not finite, or that no float holds: sent again */
  OB_REASON_WITHDRAWN,
  OB_REASON_MEMORY,     /* a plan could not be made, on some rank */
  OB_REASON_WATCHED,    /* neither ONEBIT_GRADIENTS nor a rule asks for compression */
  OB_REASON_UNFAITHFUL, /* its shadow was too far from the exact sums */
  OB_REASON_CALL,       /* of a kind that is never compressed, as MPI_Reduce is */
  OB_REASON_REFUSED,    /* a setting is wrong, ranks differ, or threads forbid it */
  OB_REASON_CAPTURED,   /* it is in a CUDA graph */
  OB_REASON_COUNT
};
const char *ob_reason_text(enum ob_reason reason);

#endif
