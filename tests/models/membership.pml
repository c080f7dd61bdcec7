/* The membership protocol of aiodist, for the model checker Spin: `make models`.

Members 0 to N-1 are in epoch 1, and J more processes join. In each epoch every member enters one
collective, votes by `agree` whether it has completed, and votes to go on to the next epoch, which
takes in whoever waits. One coordinator counts the votes. Members are killed, connections are cut,
the coordinator is restarted, and it may rule a member lost that lives. RESTARTS, KILLS, CUTS and
RULINGS say how often. With DURABLE the coordinator has a state file.

Spin tries every order of all steps. An assertion fails if the guarantees are broken, and a state in
which a member waits for ever is an error, too. Each FAULT_… leaves one rule out.

Abstractions: a step of the coordinator is atomic, and it writes to its disk before it sends. A
connection delivers in order, and loses all that is in flight if it breaks. Deadlines are not
modelled. Without a state file, a member that lives comes back before an absent one is given up. */

#define BIT(i) (1 << (i))
#define HAS(mask, i) (((mask) >> (i)) & 1)
#define M (N + J)
#define FIRST (BIT(N) - 1)
#define NOBODY 0

#define YES 1
#define NO 2

mtype = { JOIN, REJOIN, VOTE, VIEW, OUTCOME, LOST, SEATED, EVICTED };
mtype = { RECEIVES, HEARS_OF_AN_END, IS_CUT_OFF, RULES, GIVES_UP, FORMS, RESTARTS_ANEW,
          CALMS_DOWN };
mtype = { JOINING, WORKING, VOTING, GOING_ON, FINISHED };

/* up: kind, epoch, members, number of the ballot or lost members, flag or outcome that was heard */
chan up[M] = [3] of { mtype, byte, byte, byte, byte };
/* down: kind, epoch, members or outcome */
chan down[M] = [6] of { mtype, byte, byte };
bool linked[M];  /* the member has a connection */
bool current[M]; /* the coordinator uses that connection, and not one that has broken */
bool ended[M];   /* the coordinator has not yet seen the end of a connection that has broken */

byte kills, cuts, restarts, rulings;
bool is_calm;    /* nothing fails any more, so that nobody may wait for a fault to go on */

/* What no process can see, for assertions. */
byte alive = BIT(M) - 1;
byte out;                  /* members that have heard that they were ruled lost */
byte ruled;                /* all members that were ever ruled lost */
byte viewed = FIRST;       /* processes that have a view */
byte members_of[EPOCHS + 4], heard_view[EPOCHS + 4];
byte entered[EPOCHS + 4];  /* who has entered the collective of each epoch */
byte refused[EPOCHS + 4];  /* who has voted no */
byte heard_yes[EPOCHS + 4], heard_no[EPOCHS + 4];
byte told_lost[M];         /* whose loss each member has heard of in its epoch */

/* The coordinator. With a state file, the first three outlive it. */
byte last = 1;             /* the last epoch */
byte present = FIRST;      /* the members of its view; NOBODY if there is no group */
byte lost;                 /* those of them that were ruled lost */
byte seated = FIRST, absent, joiners;
byte agreed, against, outcome;  /* ballot 0 of this epoch: who has voted, who for no, its outcome */
byte going_on;                  /* ballot 1: who has voted */

byte k;  /* a counter; 0 between steps */

inline break_link(i) {
  linked[i] = false; current[i] = false; ended[i] = true;
  do :: nempty(up[i]) -> up[i]?_,_,_,_,_ :: empty(up[i]) -> break od;
  do :: nempty(down[i]) -> down[i]?_,_,_ :: empty(down[i]) -> break od
}

inline tell(i, kind, epoch, what) {
  if
  :: linked[i] && current[i] -> assert(nfull(down[i])); down[i]!kind,epoch,what
  :: else
  fi
}

inline tell_all(who, kind, epoch, what) {
  k = 0;
  do
  :: k < M && HAS(who, k) -> tell(k, kind, epoch, what); k++
  :: k < M && !HAS(who, k) -> k++
  :: k == M -> break
  od;
  k = 0
}

byte doomed;  /* who is ruled lost in this step */

inline forget(i) {  /* its votes came over a connection that is over */
  agreed = agreed & ~BIT(i); against = against & ~BIT(i); going_on = going_on & ~BIT(i)
}

inline new_view(members) {
  last++; present = members; seated = members; absent = 0; lost = 0; joiners = joiners & ~(members);
  agreed = 0; against = 0; outcome = 0; going_on = 0;
  tell_all(present, VIEW, last, present)
}

/* Without a state file: all that live and have a view are back. */
#define ALL_ARE_BACK ((alive & viewed & ~out & ~seated) == 0)

#ifdef FAULT_FORMS_EARLY
#define MAY_FORM true
#else
#define MAY_FORM (last > 0 || ALL_ARE_BACK)
#endif

#ifdef FAULT_ABSENT_VOTERS
#define ALL_ARE_HERE true
#else
#define ALL_ARE_HERE (absent == 0)
#endif

inline review() {
  if
  :: seated && agreed == seated && ALL_ARE_HERE ->
#ifdef FAULT_ONE_YES
     outcome = (against == agreed -> NO : YES);
#else
     outcome = (against -> NO : YES);
#endif
     tell_all(agreed, OUTCOME, last, outcome);
     agreed = 0; against = 0
#ifdef FAULT_OUTCOME_FORGOTTEN
     ; outcome = 0
#endif
  :: else
  fi;
  if
  :: seated && going_on == seated && ALL_ARE_HERE ->
     k = 0;
     do  /* nobody goes on with a member whose loss it has heard of */
     :: k < M -> assert(!HAS(seated, k) || (told_lost[k] & seated) == 0); k++
     :: k == M -> break
     od;
     k = 0;
     new_view(seated | joiners)
  :: else
  fi;
  if
  :: present && seated == 0 && absent == 0 ->  /* the group has ended */
     present = NOBODY; lost = 0; agreed = 0; against = 0; outcome = 0; going_on = 0
#ifdef FAULT_EPOCHS_ANEW
     ; last = 0
#endif
  :: else
  fi
}

inline lose_doomed() {
  seated = seated & ~doomed; absent = absent & ~doomed;
  lost = lost | doomed; ruled = ruled | doomed;
  agreed = agreed & ~doomed; against = against & ~doomed; going_on = going_on & ~doomed;
#ifndef FAULT_LOSS_NOT_TOLD
  tell_all(seated, LOST, last, doomed);
#endif
  doomed = 0
}

/* Closes the connections of all that are told nothing more. */
inline close(who) {
  k = 0;
  do
  :: k < M && HAS(who, k) -> break_link(k); ended[k] = false; k++
  :: k < M && !HAS(who, k) -> k++
  :: k == M -> break
  od;
  k = 0
}

inline turn_away(i) {
  do :: nempty(up[i]) -> up[i]?_,_,_,_,_ :: empty(up[i]) -> break od;
  if :: linked[i] -> down[i]!EVICTED,0,0 :: else fi
}

inline take_seat(i) {
  forget(i);
  current[i] = true;
#ifndef FAULT_END_OF_REPLACED
  ended[i] = false;
#endif
  absent = absent & ~BIT(i); seated = seated | BIT(i)
}

/* A member brings a view that is newer than what is known here. */
inline adopt(i, epoch, members, gone) {
  /* Those that are not in it have missed that the group went on. */
  ruled = ruled | (seated & ~(members));
  close(seated & ~(members));
  last = epoch; present = members; lost = 0;
  seated = seated & members; absent = members & ~seated;
  assert((agreed & seated) == 0);
  tell_all(going_on & seated, VIEW, epoch, members);
  agreed = 0; against = 0; outcome = 0; going_on = 0;
  do  /* joiners that are members of it already */
  :: k < M && HAS(joiners & members, k) ->
     joiners = joiners & ~BIT(k); absent = absent & ~BIT(k); seated = seated | BIT(k);
     tell(k, VIEW, epoch, members); k++
  :: k < M && !HAS(joiners & members, k) -> k++
  :: k == M -> break
  od;
  k = 0
}

inline come_back(i, epoch, members, gone, heard) {
  if
  :: present == NOBODY && epoch <= last -> turn_away(i)
  :: present && epoch == last && members != present -> turn_away(i)
#ifndef FAULT_NO_FENCE
  :: present && epoch == last && members == present && HAS(lost, i) -> turn_away(i)
#endif
#ifndef FAULT_OLD_EPOCH
  :: present && epoch < last && !HAS(present, i) -> turn_away(i)
#endif
  :: present && epoch < last && HAS(present & lost, i) -> turn_away(i)
  :: else ->
     if
     :: epoch > last -> adopt(i, epoch, members, gone)
     :: else
     fi;
     take_seat(i);
     if
     :: epoch == last ->
#ifndef FAULT_OUTCOME_NOT_LEARNED
        if
        :: heard && outcome == 0 ->
           outcome = heard; tell_all(agreed, OUTCOME, last, outcome); agreed = 0; against = 0
        :: else
        fi;
#endif
#ifndef FAULT_LOSS_NOT_LEARNED
        doomed = gone & ~lost & ~BIT(i);
        close(doomed & seated);
#endif
        tell(i, SEATED, last, lost)
     :: else
     fi
  fi
}

inline vote(i, epoch, number, flag) {
  if
  :: !HAS(seated, i) -> skip
  :: HAS(seated, i) && epoch < last ->
     assert(number == 1);  /* all members of an epoch have heard the verdict of the one before */
#ifndef FAULT_VIEW_NOT_TOLD_AGAIN
     tell(i, VIEW, last, present);
     if :: lost -> tell(i, LOST, last, lost) :: else fi
#endif
  :: HAS(seated, i) && epoch == last && number == 0 && outcome ->
     tell(i, OUTCOME, last, outcome)
  :: HAS(seated, i) && epoch == last && number == 0 && !outcome ->
     agreed = agreed | BIT(i);
     if :: flag == NO -> against = against | BIT(i) :: else fi
  :: HAS(seated, i) && epoch == last && number == 1 ->
     going_on = going_on | BIT(i)
  fi
}

inline join(i) {
  if
  :: HAS(present & ~lost, i) ->  /* it missed that it was admitted */
     take_seat(i); tell(i, VIEW, last, present);
     if :: lost -> tell(i, LOST, last, lost) :: else fi
  :: HAS(present & lost, i) -> turn_away(i)
  :: else -> current[i] = true; ended[i] = false; joiners = joiners | BIT(i)
  fi
}

inline receive(i) {
  up[i]?kind,a,b,c,d;
  if
  :: kind == JOIN -> join(i)
  :: kind == REJOIN -> come_back(i, a, b, c, d)
  :: kind == VOTE -> vote(i, a, c, d)
  fi;
  kind = 0; a = 0; b = 0; c = 0; d = 0
}

inline connection_lost(i) {
  ended[i] = false;
  joiners = joiners & ~BIT(i);
  doomed = seated & BIT(i)
}

inline restart() {
  close(BIT(M) - 1);
#ifdef DURABLE
  seated = 0; absent = present & ~lost;
#else
  last = 0; present = NOBODY; lost = 0; seated = 0; absent = 0;
#endif
  joiners = 0; agreed = 0; against = 0; outcome = 0; going_on = 0
}

#ifdef DURABLE
#define IS_GIVEN_UP(i) (HAS(absent, i) && (!HAS(alive & ~out, i) || (!is_calm && rulings < RULINGS)))
#else
#define IS_GIVEN_UP(i) (HAS(absent, i) && !HAS(alive & ~out, i) && ALL_ARE_BACK)
#endif

#define ABOUT(one) \
  :: nempty(up[one]) -> i = one; does = RECEIVES \
  :: ended[one] -> i = one; does = HEARS_OF_AN_END \
  :: !is_calm && cuts < CUTS && linked[one] -> i = one; does = IS_CUT_OFF \
  :: !is_calm && rulings < RULINGS && HAS(seated, one) -> i = one; does = RULES \
  :: IS_GIVEN_UP(one) -> i = one; does = GIVES_UP

/* In each step, the coordinator does one of these things. Then it looks what that decides. */
proctype coordinator() {
  mtype kind, does; byte i, a, b, c, d;
end:
  do
  :: atomic {
       if
       ABOUT(0)
#if M > 1
       ABOUT(1)
#endif
#if M > 2
       ABOUT(2)
#endif
#if M > 3
       ABOUT(3)
#endif
       :: present == NOBODY && joiners && MAY_FORM -> does = FORMS
       :: !is_calm && restarts < RESTARTS -> does = RESTARTS_ANEW
       :: !is_calm -> does = CALMS_DOWN
       fi;
       if
       :: does == RECEIVES -> receive(i)
       :: does == HEARS_OF_AN_END -> connection_lost(i)
       :: does == IS_CUT_OFF -> cuts++; break_link(i)
       :: does == RULES -> rulings++; doomed = BIT(i); close(doomed)
       :: does == GIVES_UP -> rulings = (HAS(alive & ~out, i) -> rulings + 1 : rulings); doomed = BIT(i)
       :: does == FORMS -> new_view(joiners)
       :: does == RESTARTS_ANEW -> restarts++; restart()
       :: does == CALMS_DOWN -> is_calm = true
       fi;
       if :: doomed -> lose_doomed() :: else fi;
       review();
       i = 0; does = 0
     }
  od
}

/* Whose views and verdicts are compared: those of members that are neither dead nor ruled lost.
Without a state file, a restarted coordinator may give the number of an epoch again, if the one
before told a joiner alone. Then that joiner is turned away. So joiners do not count here. */
#ifdef DURABLE
#define COUNTS (alive & ~ruled)
#else
#define COUNTS (alive & ~ruled & FIRST)
#endif

inline enter() {
  /* An epoch has one view. */
#ifndef DURABLE
  if :: (heard_view[epoch] & COUNTS) == 0 -> members_of[epoch] = members :: else fi;
#endif
  assert(members_of[epoch] == 0 || members_of[epoch] == members || !HAS(COUNTS, i));
  if :: HAS(COUNTS, i) || members_of[epoch] == 0 -> members_of[epoch] = members :: else fi;
  heard_view[epoch] = heard_view[epoch] | BIT(i);
  viewed = viewed | BIT(i); entered[epoch] = entered[epoch] | BIT(i);
  told_lost[i] = 0; heard = 0; doing = WORKING
}

inline cast(number, flag) {
  if :: linked[i] -> up[i]!VOTE,epoch,members,number,flag :: else fi
}

inline worked(flag) {
  own = flag;
  if :: own == NO -> refused[epoch] = refused[epoch] | BIT(i) :: else fi;
  doing = VOTING; cast(0, own)
}

inline heard_verdict(verdict) {
  heard = verdict;
  if
  :: verdict == YES ->
     heard_yes[epoch] = heard_yes[epoch] | BIT(i);
     assert((refused[epoch] & members & COUNTS) == 0)  /* yes is the AND of all that live */
  :: else -> heard_no[epoch] = heard_no[epoch] | BIT(i)
  fi;
  /* There is one verdict. */
  assert((heard_yes[epoch] & COUNTS) == 0 || (heard_no[epoch] & COUNTS) == 0);
  if
  :: epoch < EPOCHS -> doing = GOING_ON; cast(1, YES)
  :: else -> doing = FINISHED
  fi
}

/* A process that waits for a group, or has finished, may wait for ever. */
#define STEP(when) \
  :: atomic { (when) && !is_calm && kills < KILLS -> kills++; alive = alive & ~BIT(i); break_link(i); goto over } \
  :: atomic { (when) && !linked[i] -> \
       linked[i] = true; \
       if \
       :: doing == JOINING -> up[i]!JOIN,0,0,0,0 \
       :: else -> up[i]!REJOIN,epoch,members,told_lost[i],heard \
       fi; \
       if \
       :: doing == VOTING -> up[i]!VOTE,epoch,members,0,own \
       :: doing == GOING_ON -> up[i]!VOTE,epoch,members,1,YES \
       :: else \
       fi } \
  :: atomic { (when) && nempty(down[i]) -> \
       down[i]?kind,a,b; \
       if \
       :: kind == EVICTED -> out = out | BIT(i); ruled = ruled | BIT(i); break_link(i); goto over \
       :: (kind == LOST || kind == SEATED) && a == epoch -> told_lost[i] = told_lost[i] | b \
       :: kind == OUTCOME && a == epoch && doing == VOTING -> heard_verdict(b) \
       :: kind == VIEW && a > epoch && (doing == JOINING || doing == GOING_ON) -> \
          assert(HAS(b, i)); \
          epoch = a; members = b; enter() \
       :: else \
       fi; \
       kind = 0; a = 0; b = 0 }

proctype member(byte i) {
  byte epoch, members, heard, own, a, b;
  mtype doing, kind;
  if
  :: atomic { i < N -> epoch = 1; members = FIRST; enter() }
  :: atomic { i >= N -> doing = JOINING }
  fi;
going:
  do
  STEP(true)
  :: atomic { doing == WORKING && (entered[epoch] & members) == members -> worked(YES) }
  :: atomic { doing == WORKING && told_lost[i] -> worked(NO) }
  :: doing == JOINING || doing == FINISHED -> goto end_idle
  od;
end_idle:
  do
  STEP(doing == JOINING || doing == FINISHED)
  :: doing != JOINING && doing != FINISHED -> goto going
  od;
over:
  skip
}

init {
  byte n;
  atomic {
    run coordinator();
    do :: n < M -> linked[n] = n < N; current[n] = n < N; run member(n); n++ :: n == M -> break od
  }
}
