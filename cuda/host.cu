/*
 * What a hierarchical plan computes inside its host: the mean of the ranks' inputs, from the dense
 * messages in which they have sent them to each other.
 *
 * Bytes an element, L ranks on the host: 4 L read and 4 written.
 */
#include "cuda/mean.cuh"

/* grid.y is the member of the group whose share it is. */
static __global__ void __launch_bounds__(threads_a_block, blocks_at_once)
    host_mean_kernel(const __grid_constant__ struct ob_cuda_plan host, size_t apart, float *values,
                     size_t step, float weight) {
  struct location location;
  if (!find_location(host, segment_of(host, host.geometry.member) + blockIdx.y, &location))
    return;
  struct senders senders = senders_of(host, 0);
  senders.own += blockIdx.y * apart;
  senders.before += blockIdx.y * apart;
  senders.after += blockIdx.y * apart;
  write_mean(host, senders, location, weight, values + blockIdx.y * step);
}

cudaError_t ob_cuda_host_mean(struct ob_cuda_plan host, size_t members, float *values, size_t step,
                              size_t chunk, cudaStream_t stream) {
  return launch(host_mean_kernel, host.max_blocks, members, stream, of_chunk(host, chunk),
                host.geometry.peer_stride / members, values, step,
                (float)(1.0 / (double)host.geometry.members));
}
