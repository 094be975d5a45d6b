/* Why calls of a program are not compressed, in an order that reports keep. */
#ifndef OB_DROPIN_REASON_H
#define OB_DROPIN_REASON_H

/* Why a call can not be compressed, or is not. Reports count by it. */
enum ob_reason {
  OB_REASON_NONE = 0,  /* it can be */
  OB_REASON_TYPE,      /* not float, bfloat16, half */
  OB_REASON_OPERATION, /* neither a sum nor a mean */
  OB_REASON_SMALL,     /* below the least number of bytes */
  OB_REASON_ALONE,     /* one rank, or an inter-communicator */
  OB_REASON_RULE,      /* a rule says so, or none asks for it (allgathers) */
  OB_REASON_LEARNING,  /* not yet seen often enough, in this order */
  OB_REASON_UNSTABLE,  /* the order of calls does not repeat; before NCCL, or buffers */
  /* compressed, but a rank had other buffers or no finite values: sent again dense */
  OB_REASON_WITHDRAWN,
  OB_REASON_MEMORY,   /* a plan could not be made, on some rank */
  OB_REASON_WATCHING, /* whether it is like a gradient is being found out */
  OB_REASON_UNLIKE,   /* it is not like a gradient: enum ob_finding says why */
  OB_REASON_SLOWER,   /* compressing it took longer */
  OB_REASON_REFUSED,  /* ranks differ in rules or version, or threads forbid it */
  OB_REASON_CAPTURED, /* it is in a CUDA graph */
  OB_REASON_COUNT
};
const char *ob_reason_text(enum ob_reason reason);

#endif
