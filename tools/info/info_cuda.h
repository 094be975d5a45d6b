/* What onebit-info says of GPUs. */
#ifndef TOOLS_INFO_CUDA_H
#define TOOLS_INFO_CUDA_H

/* The versions of CUDA, the devices and whether they can be used, NCCL. In builds with CUDA. */
void info_print_cuda(void);

#endif
