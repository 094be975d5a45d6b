/* A mutex that is held until the end of a block, even if the block ends by a return. */
#ifndef OB_BASE_LOCK_H
#define OB_BASE_LOCK_H

#include <pthread.h>

static inline void ob_unlock(pthread_mutex_t *const *mutex) { pthread_mutex_unlock(*mutex); }

/* Locks the mutex, and unlocks it at the end of the block. */
#define OB_LOCKED(mutex)                                                                           \
  pthread_mutex_t *const ob_locked __attribute__((cleanup(ob_unlock))) = (mutex);                  \
  pthread_mutex_lock(ob_locked)

#endif
