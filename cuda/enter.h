/* Sets and restores the thread's current device around the library's work. */
#ifndef OB_CUDA_ENTER_H
#define OB_CUDA_ENTER_H

/* Makes a device current for this thread, and prevents the thread's calls from disturbing graphs
 * that any thread is capturing. Returns the value with which ob_cuda_leave restores both. */
#define OB_CURRENT_DEVICE (-1)
int ob_cuda_enter(int number);
void ob_cuda_leave(int before);

/* Makes a device current until the end of the block, however the block is left. */
#define OB_ON_DEVICE(number)                                                                       \
  int ob_device_before __attribute__((cleanup(ob_cuda_leave_block), unused)) = ob_cuda_enter(number)
void ob_cuda_leave_block(const int *before);

#endif
