class BlockLearner: pass
