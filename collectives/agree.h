/*
 * Agreement: before anything collective is made, all ranks tell each other what they want and
 * whether they can, so that they fail together, with a message that names the difference, and none
 * is left waiting.
 */
#ifndef OB_COLLECTIVES_AGREE_H
#define OB_COLLECTIVES_AGREE_H

#include "collectives/communicator.h"

/* Something that must be the same on all ranks. */
struct ob_term {
  const char *name;
  uint64_t value;
};

enum { OB_TERMS = (OB_AGREE_BYTES - 40) / 8 };

/* Collective. `status` is this rank's status so far. Returns ONEBIT_OK if all ranks have that and
 * all terms are equal; this rank's own error, with its message; ONEBIT_ERROR_PEER if another rank
 * has an error, or ONEBIT_ERROR_MEMORY if that is it; ONEBIT_ERROR_MISMATCH if terms differ;
 * ONEBIT_ERROR_MESSAGE if a rank's message is damaged, has another length, or belongs to another
 * agreement. */
onebit_status_t ob_agree(onebit_comm_t comm, onebit_status_t status, const struct ob_term *terms,
                         size_t count);

/* Does the same, and sends the other ranks a number of this rank. */
onebit_status_t ob_agree_noting(onebit_comm_t comm, onebit_status_t status,
                                const struct ob_term *terms, size_t count, uint64_t note);

/* Compares the proposals of all ranks in comm->control_memory, received as comm->control says:
 * the part of an agreement that follows when they have arrived. The proposals are not trusted.
 * Local. */
onebit_status_t ob_agree_check(onebit_comm_t comm, const struct ob_term *terms, size_t count);

/* The note that a rank told in the latest agreement, if that ended well. */
uint64_t ob_agree_note(onebit_comm_t comm, int rank);

/* True after an agreement that ended with ONEBIT_ERROR_MISMATCH if this term alone differed. All
 * ranks find the same. */
bool ob_agree_differed_only(onebit_comm_t comm, size_t term);

/* Exchanges the names of the ranks' hosts, for error messages. Collective, once. NULL: the name
 * from gethostname. */
onebit_status_t ob_agree_names(onebit_comm_t comm, const char *name);

/* Says with ONEBIT_DEBUG=INFO that a communicator is made, once its hosts are known. */
void ob_comm_log(onebit_comm_t comm);

#endif
