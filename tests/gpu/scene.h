/* Memory that exists on host and device, and test cases in it (scenes) that compare kernels with
 * the host's code. */
#ifndef ONEBIT_TESTS_GPU_SCENE_H
#define ONEBIT_TESTS_GPU_SCENE_H

#include <stdbool.h>
#include <stddef.h>

#include "collectives/plan_private.h"
#include "cuda/kernels.h"
#include "tests/codec_cases.h"

/*
 * ---- Twins (scene_data.c) ----
 *
 * A twin is memory that exists twice: on the host and on the device. A test allocates arrays in the
 * twin and fills them on the host; the device gets a copy. The library's codec then works on the
 * host's memory and a kernel on the device's. Afterwards every byte must be the same in both
 * memories, in the arrays and in the pattern that fills the gaps between them.
 */

/* The type of an array's contents. Two NaNs count as equal, since host and device create NaNs with
 * different bits. */
enum twin_content { TWIN_BYTES, TWIN_FLOAT32, TWIN_BFLOAT16, TWIN_FLOAT16, TWIN_FLOAT64 };

struct twin_array {
  const char *name;
  size_t at, bytes;
  enum twin_content content;
};

#define TWIN_ARRAYS 320

struct twin {
  unsigned char *host, *device, *back; /* back: a copy of the device's memory */
  size_t capacity, used;
  struct twin_array arrays[TWIN_ARRAYS];
  size_t count;
};

/* If the device does not have enough memory, reports a failure and returns false. */
bool twin_create(struct twin *twin, size_t capacity);
void twin_destroy(struct twin *twin);

/* Frees all arrays. */
void twin_clear(struct twin *twin);

/* Allocates an array on the host, filled with the pattern. It begins `skew` bytes after a multiple
 * of 256. */
void *twin_allocate(struct twin *twin, const char *name, size_t bytes, enum twin_content content,
                    size_t skew);

/* For an address of the host's memory, twin_on_device returns the address on the device, and
 * twin_in_copy the address in the copy that was fetched. For NULL both return NULL. */
void *twin_on_device(const struct twin *twin, const void *host);
void *twin_in_copy(const struct twin *twin, const void *host);

bool twin_copy_to_device(struct twin *twin);
bool twin_copy_back(struct twin *twin); /* waits for all launched work first */

/* Compares both memories. A failure names the array and the position. */
bool twin_check(const struct twin *twin, const char *file, int line);
#define CHECK_TWIN(twin) twin_check((twin), __FILE__, __LINE__)

/*
 * ---- Scenes (scene.c) ----
 *
 * A scene is one test case of the kernels, set up for the processor's codec and for the device.
 *
 * On the host, the scene is a plan of the library that the test has built in a twin's memory. The
 * library's own steps compute the expected results with that plan. For the device, the scene
 * describes the same plan by the kernels' structs.
 */

/* The schedule of the scene's plan. A share is the part of a buffer that one member reduces. */
enum scene_mode {
  SCENE_EXCHANGE, /* an allreduce in which each member reduces a share */
  SCENE_SHIFTED,  /* the same with only some of the shares, as in a hierarchical plan */
  SCENE_PADDED,   /* one share for each piece; the buffer ends in padding, as in profile
                   * deepspeed */
  SCENE_SCATTER,  /* reduce-scatter: one share for each piece */
  SCENE_WHOLE,    /* an allreduce in which each member sends a message to all */
  SCENE_ROTATED,  /* like SCENE_WHOLE, but results are in the order in which rounds forward them */
  SCENE_GATHERED, /* an allgather */
  SCENE_GATHERED_ROTATED,
  SCENE_MODES
};

#define SCENE_PIECES 33

struct scene_case {
  enum scene_mode mode;
  size_t pieces, counts[SCENE_PIECES];
  size_t block, members, place, chunks, slots;
  size_t skew; /* elements between an aligned address and the buffers */
  enum codec_values values;
  onebit_dtype_t dtype, output_dtype;
  onebit_scale_t rule;
  bool one_scale, dense, momentum;
  bool each;        /* pieces are not adjacent, and some have no input */
  bool from_values; /* the input is float32, as messages have it */
  bool float32;     /* inputs are float32, whatever the plan's dtype */
  bool weighed;     /* compress gets factors for tensors (scalings) and elements (reciprocals) */
  bool moments;     /* compress gets moments of the gradients */
  bool counted;     /* only the device knows the moments' bias correction */
  bool lion;        /* the server keeps Lion's momentum */
  uint32_t now, stop;
};

struct scene {
  const struct scene_case *what;
  struct twin *twin;
  struct onebit_plan host;
  struct ob_flight flight; /* the flight of the host's plan */
  struct ob_plan_state kept;
  struct ob_cuda_plan device;
  struct ob_cuda_state *state; /* the state in the twin's host memory */
  /* The range of chunks that have messages: all chunks, or only one if the plan has fewer slots. */
  size_t first_chunk, end_chunk;
  struct ob_cuda_source source;
  struct ob_cuda_pieces outputs;
  const float *input_values;
};

/* Fills in the scene in host memory. Nothing is copied to the device yet. */
void scene_create(struct scene *scene, struct twin *twin, const struct scene_case *what);
void scene_destroy(struct scene *scene);

/* Fill the memory of a scene once its plan exists (scene_data.c). */
void scene_fill_plan(struct scene *scene);
void scene_fill_buffers(struct scene *scene);

/* The address on the device of an object on the host. */
#define ON_DEVICE(scene, pointer) ((void *)twin_on_device((scene)->twin, (pointer)))

void scene_describe(const struct scene_case *what, char *text, size_t capacity);

/* Run a step of the host's plan for a chunk. */
void scene_compress(struct scene *scene, size_t chunk);
void scene_reduce(struct scene *scene, size_t chunk);
void scene_apply(struct scene *scene, size_t chunk);

#endif
