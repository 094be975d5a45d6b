/*
 * Checkpoints of optimizers, and of outer steps. A checkpoint has the complete state: parameters
 * (the master values), moments, residuals, step counts, stage, schedules and loss scale. A run that
 * loads it with the same options and number of ranks has the same results as the saved run would
 * have had, to the bit.
 *
 * Each rank saves one part: a share of the state that is equal on all ranks, and the rank's own
 * state. docs/checkpoints.md describes the format, the options that may differ between saving and
 * loading, and the state with which another number of ranks begins. With another number of ranks
 * training continues without a jump, but results do not have the same bits.
 */
#ifndef ONEBIT_CHECKPOINT_H
#define ONEBIT_CHECKPOINT_H

#include <stddef.h>

#include "onebit/outer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Writes this rank's part of the checkpoint to memory. Local; it waits for steps on streams, and
 * fails while a step is open.
 *   optimizer   the optimizer; unchanged
 *   memory      the caller's memory; NULL: the call only returns the size
 *   capacity    the bytes of `memory`
 *   bytes       out: the part's bytes; never NULL
 * Errors: ONEBIT_ERROR_ARGUMENT (NULL, a capacity that is too small, with *bytes set),
 * ONEBIT_ERROR_BUSY (a step is open), ONEBIT_ERROR_MEMORY, ONEBIT_ERROR_DEVICE. */
onebit_status_t onebit_optimizer_save(onebit_optimizer_t optimizer, void *memory, size_t capacity,
                                      size_t *bytes);

/* Writes this rank's part as onebit_optimizer_save does, but with all of the state that is equal on
 * all ranks instead of a share of it. If only one rank saves, only the other ranks' own state is
 * missing. Parts that this function and onebit_optimizer_save wrote can be loaded together.
 *   optimizer, memory, capacity, bytes, errors   as onebit_optimizer_save */
onebit_status_t onebit_optimizer_save_whole(onebit_optimizer_t optimizer, void *memory,
                                            size_t capacity, size_t *bytes);

/* Loads the state, parameters included, from the parts of all ranks that saved. Collective: on
 * failure, all ranks get an error, and the optimizer and the parameters are as they were. The
 * optimizer may have made steps before.
 *   optimizer   made from tensors of the same counts
 *   parts       `count` pointers to the parts, in the order of the ranks that saved; read only. A
 *               rank reads only the sections that it needs
 *   bytes       of each part
 *   count       the number of ranks that saved
 * Errors: ONEBIT_ERROR_ARGUMENT (NULL, count below 1), ONEBIT_ERROR_CHECKPOINT (the message says
 * what is wrong with which part), ONEBIT_ERROR_MISMATCH (the ranks have different checkpoints),
 * ONEBIT_ERROR_PEER, ONEBIT_ERROR_BUSY (a step is open), ONEBIT_ERROR_MEMORY,
 * ONEBIT_ERROR_TRANSPORT, ONEBIT_ERROR_DEVICE; after the last two errors a part of the state may
 * have been loaded. */
onebit_status_t onebit_optimizer_load(onebit_optimizer_t optimizer, const void *const *parts,
                                      const size_t *bytes, int count);

/* Saves to files, one for each rank, in a directory that all ranks see. The directory is created if
 * it does not exist; its parent must exist. Collective. If saving is interrupted at any point,
 * loading finds either the complete previous checkpoint or the complete new one
 * (docs/checkpoints.md, "Files").
 *   optimizer   the optimizer; unchanged
 *   directory   its path. Symbolic links in the directory are not followed
 * Errors: those of onebit_optimizer_save; ONEBIT_ERROR_FILE (the disk is full, for example; the
 * message has the file and the reason; the previous checkpoint stays), ONEBIT_ERROR_PEER. */
onebit_status_t onebit_optimizer_save_files(onebit_optimizer_t optimizer, const char *directory);

/* Loads the latest checkpoint of onebit_optimizer_save_files. Collective. The call refuses files
 * that are damaged, and those that are not regular files. A rank holds only the piece that it needs
 * in memory.
 *   optimizer, errors   as onebit_optimizer_load, and ONEBIT_ERROR_FILE (the message has the file
 *                       and the reason). If a file changes or its disk fails after it was checked,
 *                       that rank's message says that part of the state has been loaded
 *   directory           its path */
onebit_status_t onebit_optimizer_load_files(onebit_optimizer_t optimizer, const char *directory);

/* Writes this rank's part of an outer step to memory. Local, but it waits for an exchange in
 * flight: all ranks must call it when they have begun the same exchanges. A resumed run continues
 * to the bit, even if it was saved in the middle of a round.
 *   outer      the outer step; unchanged
 *   memory, capacity, bytes   as in onebit_optimizer_save
 * Memory while it writes: 8 bytes per element.
 * Errors: ONEBIT_ERROR_ARGUMENT (NULL, a capacity that is too small, with *bytes set),
 * ONEBIT_ERROR_UNSUPPORTED (this site was absent, and has received only a part of the consensus:
 * save after a later exchange), ONEBIT_ERROR_TRANSPORT (the outer step has stopped after a
 * failure), ONEBIT_ERROR_MEMORY, and those of an exchange in flight that failed.
 *
 * With several sites each site saves its own complete checkpoint, in a directory of its own, and
 * saving is collective over the ranks of the site. Loading is collective over all sites.
 * docs/outer.md ("Several sites") says when a loaded run continues to the bit. */
onebit_status_t onebit_outer_save(onebit_outer_t outer, void *memory, size_t capacity,
                                  size_t *bytes);

/* Loads the state, parameters included, from the parts of all ranks that saved, as
 * onebit_optimizer_load does. Collective. An exchange in flight ends without being applied.
 *   outer               made from tensors of the same counts, with the same number of fragments.
 *                       The saved outer step and this one must both use `weighted` or neither, and
 *                       both an outer momentum or neither. All other options may differ;
 *                       ONEBIT_OUTER_DENSE ignores residuals. If local_steps differs, the next
 *                       exchange is still that of the same fragment
 *   parts, bytes, count   as in onebit_optimizer_load
 * Errors: those of onebit_optimizer_load but ONEBIT_ERROR_BUSY and ONEBIT_ERROR_DEVICE;
 * ONEBIT_ERROR_MISMATCH also if the ranks have not begun the same exchanges. */
onebit_status_t onebit_outer_load(onebit_outer_t outer, const void *const *parts,
                                  const size_t *bytes, int count);

/* Save to and load from files, one for each rank, as onebit_optimizer_save_files and
 * onebit_optimizer_load_files do. Collective. Save an optimizer and an outer step to different
 * directories.
 *   outer       the outer step
 *   directory   its path
 * Errors: those of onebit_outer_save, onebit_outer_load; ONEBIT_ERROR_MISMATCH (the ranks have not
 * begun the same exchanges), ONEBIT_ERROR_FILE, ONEBIT_ERROR_PEER. */
onebit_status_t onebit_outer_save_files(onebit_outer_t outer, const char *directory);
onebit_status_t onebit_outer_load_files(onebit_outer_t outer, const char *directory);

#ifdef __cplusplus
}
#endif
#endif
