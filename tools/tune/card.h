/*
 * Predicts a step of data-parallel training on GPUs whose ranks talk over NCCL: the bytes of
 * kernels, by the counts at the heads of cuda/, at a copy's bandwidth; launches and NCCL's groups,
 * a latency each; and messages over the links inside a host and between hosts. It is counted, not
 * measured.
 */
#ifndef TOOLS_TUNE_CARD_H
#define TOOLS_TUNE_CARD_H

#include "tools/tune/training.h"

struct tune_card {
  double copy;    /* bytes a second that a copy in its memory reads and writes */
  double launch;  /* seconds that a kernel takes however little it does */
  double group;   /* likewise an NCCL group, inside a host */
  double inside;  /* bytes a second of one GPU to the others of its host, each way */
  double latency; /* seconds from host to host, besides */
  double link;    /* bytes a second between hosts, of a host's link, each way */
};

/* An H200, in a host where NVLink joins all GPUs; the link is to be filled in. */
extern const struct tune_card tune_card_default;

/* An update: exchange of all gradients, and the pass that applies it. Where chunks overlap,
 * `together` is less than kernels and messages. */
struct tune_update {
  double kernels, messages, together; /* seconds of a rank, launches and latencies included */
  double launches, groups, host_bytes;
};

struct tune_update tune_card_update(const struct tune_card *card,
                                    const struct tune_training *training, enum tune_method method);

/* overlap: messages hide behind the backward pass, as tune_step_seconds has it; kernels do not,
 * which would slow it down. */
double tune_card_step(const struct tune_card *card, const struct tune_training *training,
                      enum tune_method method, bool overlap);

#endif
