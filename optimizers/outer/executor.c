/* Who makes the passes of the outer step; and what is done once in a while, on the host. */
#include "base/error.h"
#include "base/memory.h"
#include "optimizers/outer/outer.h"

onebit_status_t ob_outer_choose_executor(struct onebit_outer *outer) {
  const onebit_device_t device = outer->options.device;
  outer->executor = device == ONEBIT_DEVICE_HOST ? &ob_outer_executor_host : NULL;
#ifdef ONEBIT_HAVE_CUDA
  if (device == ONEBIT_DEVICE_CUDA)
    outer->executor = &ob_outer_executor_cuda;
#endif
  if (!outer->executor)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "device is ONEBIT_DEVICE_CUDA: this library was built without CUDA");
  return ONEBIT_OK;
}

onebit_status_t ob_outer_copy(const struct onebit_outer *outer, void *to, const void *from,
                              size_t bytes) {
  const struct ob_outer_executor *executor = outer->executor;
  const int before = executor->enter ? executor->enter(outer) : 0;
  const onebit_status_t status = executor->memory->copy(to, from, bytes);
  if (executor->leave)
    executor->leave(before);
  return status;
}

onebit_status_t ob_outer_clear(const struct onebit_outer *outer, void *memory, size_t bytes) {
  const struct ob_outer_executor *executor = outer->executor;
  const int before = executor->enter ? executor->enter(outer) : 0;
  const onebit_status_t status = executor->memory->clear(memory, bytes);
  if (executor->leave)
    executor->leave(before);
  return status;
}

/* --- The host's copies -------------------------------------------------------------------------*/

/* An array becomes a copy; `home` keeps where it was. */
static onebit_status_t copy_here(const struct onebit_outer *outer, void **array, void **home,
                                 size_t bytes) {
  if (!*array)
    return ONEBIT_OK;
  void *copy = ob_allocate(1, bytes);
  if (!copy)
    return ob_error(ONEBIT_ERROR_MEMORY,
                    "no memory of the host for an outer step of %zu parameters", outer->count);
  const onebit_status_t status = ob_outer_copy(outer, copy, *array, bytes);
  *home = *array;
  *array = copy;
  return status;
}

static onebit_status_t send_back(const struct onebit_outer *outer, void **array, void **home,
                                 size_t bytes, bool changed) {
  if (!*home)
    return ONEBIT_OK;
  const onebit_status_t status = changed ? ob_outer_copy(outer, *home, *array, bytes) : ONEBIT_OK;
  ob_release(*array);
  *array = *home;
  *home = NULL;
  return status;
}

static size_t parameter_bytes(const struct onebit_outer *outer, size_t tensor) {
  return outer->tensors[tensor].count * ob_dtype_size(outer->options.parameter_dtype);
}

static onebit_status_t copy_all(struct onebit_outer *outer) {
  for (int k = 0; k < OB_OUTER_HOME_ARRAYS; k++)
    OB_TRY(copy_here(outer, &outer->array[k], &outer->home[k], outer->count * sizeof(float)));
  for (size_t t = 0; t < outer->tensor_count; t++) {
    struct ob_outer_tensor *tensor = &outer->tensors[t];
    OB_TRY(copy_here(outer, &tensor->parameter, &tensor->home, parameter_bytes(outer, t)));
  }
  return ONEBIT_OK;
}

onebit_status_t ob_outer_to_host(struct onebit_outer *outer) {
  if (outer->executor->memory == &ob_memory_host || outer->on_host)
    return ONEBIT_OK;
  outer->on_host = true;
  const onebit_status_t status = copy_all(outer);
  ob_fragments_point(outer);
  if (status != ONEBIT_OK)
    (void)ob_outer_from_host(outer, false); /* only pointers change */
  return status;
}

/* Copies all of them, even if one fails. */
onebit_status_t ob_outer_from_host(struct onebit_outer *outer, bool changed) {
  onebit_status_t status = ONEBIT_OK;
  if (!outer->on_host)
    return ONEBIT_OK;
  outer->on_host = false;
  for (int k = 0; k < OB_OUTER_HOME_ARRAYS; k++) {
    const onebit_status_t sent =
        send_back(outer, &outer->array[k], &outer->home[k], outer->count * sizeof(float), changed);
    status = status == ONEBIT_OK ? sent : status;
  }
  ob_fragments_point(outer);
  for (size_t t = 0; t < outer->tensor_count; t++) {
    struct ob_outer_tensor *tensor = &outer->tensors[t];
    const onebit_status_t sent =
        send_back(outer, &tensor->parameter, &tensor->home, parameter_bytes(outer, t), changed);
    status = status == ONEBIT_OK ? sent : status;
  }
  return status;
}
